"""AutoAttack in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dat.attacks import FGSM, PGD, Attack, Square, suites
from dat.core.threat import ThreatModel
from dat.data import ImageData
from dat.distributed import World
from dat.evaluation import AutoAttackResult, autoattack
from tests.evaluation.cases import Noisy, ProgressRecorder, Spy, Stopped, everything, right

EPS = 0.08
SUITE: dict[str, Attack] = {
    "square": Square(queries=20),
    "fgsm": FGSM(step_ratio=0.6),
    "pgd": PGD(steps=3),
}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suite of the same name that is done in a moment."""
    monkeypatch.setitem(suites.SUITES, "autoattack", lambda classes: SUITE)


def attacked(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> AutoAttackResult:
    chosen: dict[str, Any] = {"eps": EPS} | options
    return autoattack(model, x, y, **chosen)


def check(
    result: AutoAttackResult, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel
) -> None:
    """What holds of every result."""
    count = len(y)
    assert result.examples.shape == x.shape
    assert result.examples.dtype == x.dtype
    assert len(result.broken_by) == count
    assert sum(result.counts.values()) + int(result.robust.sum()) == count
    assert list(result.counts) == ["clean", *result.costs]
    for name, fell in result.counts.items():
        assert result.broken_by.count(name) == fell
    assert set(result.broken_by) <= {*result.counts, None}
    assert result.robust.tolist() == [name is None for name in result.broken_by]
    assert result.ra == pytest.approx(100 * float(result.robust.double().mean()))
    with torch.no_grad():
        clean, answers = (model(images).argmax(1) for images in (x, result.examples))
    assert [name == "clean" for name in result.broken_by] == (clean != y).tolist()
    assert result.ta == pytest.approx(100 * float((clean == y).double().mean()))
    assert torch.equal(answers == y, result.robust)
    unchanged = torch.tensor([name in (None, "clean") for name in result.broken_by])
    assert torch.equal(result.examples[unchanged], x[unchanged])
    assert float(result.examples.min()) >= 0
    assert float(result.examples.max()) <= 1
    assert float(threat.size(result.examples, x).max()) <= threat.eps + 1e-6


@pytest.mark.parametrize(("norm", "eps"), [("linf", EPS), ("l2", 0.5)])
def test_every_figure_fits_the_others(
    model: nn.Module, small_data: ImageData, world: World, quick: None, norm: str, eps: float
) -> None:
    x, y = everything(small_data)
    result = attacked(model, x, y, norm=norm, eps=eps, world=world)
    check(result, model, x, y, ThreatModel(norm=norm, eps=eps))
    assert list(result.counts) == ["clean", *SUITE]
    assert all(count > 0 for count in result.counts.values())
    assert 0 < result.ra < result.ta < 100
    assert result.costs["square"].backwards == 0
    assert result.costs["fgsm"].backwards > 0
    standing = len(x) - result.counts["clean"] - result.counts["square"]
    assert result.costs["fgsm"][1:] == (2 * standing, standing)


def test_the_standard_suite(model: nn.Module, small_data: ImageData, world: World) -> None:
    """All of it, as published, on a few images at a radius at which some withstand it."""
    x, y = everything(small_data.take(torch.arange(10)))
    result = attacked(model, x, y, eps=0.06, world=world)
    check(result, model, x, y, ThreatModel(eps=0.06))
    assert list(result.costs) == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert 0 < result.ra < result.ta
    standing = int(result.robust.sum())
    assert result.costs["square"].forwards >= 5001 * standing
    assert result.warnings == ()


def test_the_random_version(
    model: nn.Module, small_data: ImageData, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told apart by its attacks, and repeats itself though the model does not."""
    monkeypatch.setattr(suites, "RAND_EOT", 2)
    x, y = everything(small_data.take(torch.arange(12)))
    noisy = Noisy(model, 0.02)
    result = attacked(noisy, x, y, version="rand", world=world)
    assert list(result.counts) == ["clean", "apgd-ce", "apgd-dlr"]
    assert sum(result.counts.values()) + int(result.robust.sum()) == len(y)
    assert 0 < result.ra < result.ta
    assert any("is randomized" in text for text in result.warnings)
    again = attacked(noisy, x, y, version="rand", world=world)
    assert again.broken_by == result.broken_by
    assert torch.equal(again.examples, result.examples)


@pytest.mark.parametrize("version", ["plus", "Standard", ""])
def test_an_unknown_version_is_refused(
    model: nn.Module, small_data: ImageData, version: str
) -> None:
    with pytest.raises(ValueError, match=f"version = '{version}': must be one of standard, rand"):
        attacked(model, *everything(small_data), version=version)


def test_nonsense_is_refused(model: nn.Module, small_data: ImageData, world: World) -> None:
    x, y = everything(small_data)
    wrong: dict[str, tuple[Tensor, Tensor, dict[str, Any]]] = {
        "batch = 0: must be at least 1": (x, y, {"batch": 0}),
        "norm = 'l3': must be one of linf, l2": (x, y, {"norm": "l3"}),
        "eps = -1: must be at least 0": (x, y, {"eps": -1}),
        "pixels from 0 to 255: must be in": (255 * x, y, {}),
        r"must be one per image, \(60,\)": (x, y[:-1], {}),
        "must be integers": (x, y.float(), {}),
        "the model cannot take images of shape": (x[:, :, :4], y, {}),
    }
    for message, (images, labels, options) in wrong.items():
        with pytest.raises(ValueError, match=message):
            attacked(model, images, labels, world=world, **options)


def test_an_interrupted_call_goes_on_where_it_was(
    model: nn.Module,
    small_data: ImageData,
    world: World,
    tmp_path: Path,
    quick: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = everything(small_data)
    whole = attacked(model, x, y, world=world)
    spy = Spy(inner=SUITE["fgsm"], bears=2)
    monkeypatch.setitem(SUITE, "fgsm", spy)
    with pytest.raises(Stopped):
        attacked(model, x, y, world=world, batch=8, folder=str(tmp_path))
    calm = Spy(inner=spy.inner)
    monkeypatch.setitem(SUITE, "fgsm", calm)
    again = attacked(model, x, y, world=world, batch=33, folder=tmp_path)
    assert again.broken_by == whole.broken_by
    assert again.counts == whole.counts
    assert {name: cost[1:] for name, cost in again.costs.items()} == {
        name: cost[1:] for name, cost in whole.costs.items()
    }
    check(again, model, x, y, ThreatModel(eps=EPS))
    assert spy.sizes == [8, 8]
    assert not set(spy.everybody) & set(calm.everybody)
    once_more = attacked(model, x, y, world=world, folder=tmp_path)
    assert once_more.broken_by == whole.broken_by
    assert torch.equal(once_more.examples, again.examples)
    assert len(list(tmp_path.glob("autoattack-*/verdicts.json"))) == 1


def test_images_without_a_channel(
    model: nn.Module, small_data: ImageData, world: World, quick: None
) -> None:
    """Examples have the shape of the images that were given: a difference of the two must not
    spread over all pairs of images."""
    x, y = everything(small_data)
    expected = attacked(model, x, y, world=world)
    result = attacked(model, x.squeeze(1), y, world=world)
    assert result.broken_by == expected.broken_by
    assert result.examples.shape == (60, 8, 8)
    assert torch.equal(result.examples, expected.examples.squeeze(1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_labels_may_be_any_whole_numbers(
    model: nn.Module, small_data: ImageData, world: World, quick: None, dtype: torch.dtype
) -> None:
    x, y = everything(small_data)
    expected = attacked(model, x, y, world=world)
    assert attacked(model, x, y.to(dtype), world=world).broken_by == expected.broken_by


def test_images_may_be_doubles(
    model: nn.Module, small_data: ImageData, world: World, quick: None
) -> None:
    x, y = everything(small_data)
    result = attacked(model, x.double(), y, world=world)
    assert result.examples.dtype == torch.float64
    assert result.broken_by == attacked(model, x, y, world=world).broken_by


def test_bytes_are_refused_or_answered_in_pixels(
    model: nn.Module, small_data: ImageData, world: World, quick: None
) -> None:
    """An example is a float in [0, 1]; as a byte it would be black."""
    x, y = everything(small_data)
    x_bytes = (255 * x).round().to(torch.uint8)
    x = x_bytes.float() / 255
    try:
        result = attacked(model, x_bytes, y, world=world)
    except ValueError:
        return
    check(result, model, x, y, ThreatModel(eps=EPS))


def test_what_is_given_is_left_alone(
    model: nn.Module, small_data: ImageData, world: World, quick: None
) -> None:
    x, y = everything(small_data)
    x.requires_grad_(True)
    before, labels = x.detach().clone(), y.clone()
    model.train()
    result = attacked(model, x, y, world=world)
    assert model.training
    assert x.grad is None
    assert not result.examples.requires_grad
    assert torch.equal(x, before)
    assert torch.equal(y, labels)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_seed_and_the_progress_are_the_callers(
    model: nn.Module, small_data: ImageData, world: World, quick: None
) -> None:
    x, y = everything(small_data)
    progress = ProgressRecorder()
    first = attacked(model, x, y, world=world, progress=progress)
    assert progress.done
    outcomes = {attacked(model, x, y, world=world, seed=seed).broken_by for seed in (0, 1, 2, 3)}
    assert first.broken_by in outcomes
    assert len(outcomes) > 1


def test_without_a_world_it_joins_one(
    model: nn.Module, small_data: ImageData, no_launcher: None, quick: None
) -> None:
    x, y = everything(small_data)
    alone = attacked(model, x, y)
    joined = attacked(model, x, y, world=World.join())
    assert alone.broken_by == joined.broken_by
    assert int(alone.robust.sum()) <= int(right(model, small_data).sum())


def test_some_attacks_in_the_order_of_the_caller(
    model: nn.Module, small_data: ImageData, world: World, quick: None
) -> None:
    x, y = everything(small_data)
    result = attacked(model, x, y, attacks=["pgd", "square"], world=world)
    check(result, model, x, y, ThreatModel(eps=EPS))
    assert result.attacks == ("pgd", "square")
    assert result.suite == "pgd+square"
    assert repr(result).startswith("pgd+square (not all of AutoAttack): 60 images, TA ")
    alone = attacked(model, x, y, attacks=["pgd"], world=world)
    assert alone.counts["pgd"] == result.counts["pgd"]


def test_all_attacks_are_autoattack(
    model: nn.Module, small_data: ImageData, world: World, quick: None
) -> None:
    x, y = everything(small_data)
    result = attacked(model, x, y, attacks=[*SUITE], world=world)
    assert result.suite == "autoattack"
    assert repr(result).startswith("autoattack: 60 images, TA ")
    assert result.broken_by == attacked(model, x, y, world=world).broken_by


@pytest.mark.parametrize(
    ("attacks", "message"),
    [
        (["square", "fgsn"], r"attacks: 'fgsn' is not in autoattack: did you mean fgsm\?"),
        (["square", "square"], r"attacks = \['square', 'square'\]: must be at least one"),
        ([], r"attacks = \[\]: must be at least one, and none twice"),
        ("square", "attacks = 'square': must be a list of names"),
    ],
)
def test_wrong_choices_of_attacks(
    model: nn.Module, small_data: ImageData, world: World, quick: None, attacks: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        attacked(model, *everything(small_data), attacks=attacks, world=world)


def test_the_table_says_which_attack_broke_which_image(
    model: nn.Module, small_data: ImageData, world: World, quick: None
) -> None:
    result = attacked(model, *everything(small_data), world=world)
    header, *lines = [line.split("\t") for line in result.table().splitlines()]
    assert header == ["attack", "broke", "accuracy", "images"]
    assert [name for name, *_ in lines] == ["clean", *SUITE]
    for name, count, _, rows in lines:
        broken = [row for row, broken_by in enumerate(result.broken_by) if broken_by == name]
        assert (int(count), rows) == (len(broken), ",".join(map(str, broken)))
    assert [float(lines[0][2]), float(lines[-1][2])] == [round(result.ta, 1), round(result.ra, 1)]
