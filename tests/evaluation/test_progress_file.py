"""What an evaluation leaves on disk, and how another one goes on from there."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dat.attacks import FAB, PGD, Square
from dat.attacks.suites import suite_of
from dat.core.threat import ThreatModel
from dat.data import ImageData
from dat.distributed import World
from dat.evaluation import Suite, SuiteResult, assess
from dat.evaluation.progress_file import Cost, EvaluationPart, SuiteProgress, fingerprint
from dat.evaluation.runner import Runner
from tests.evaluation.cases import THREAT, Brightness, Spy, Stopped, everything, right, white


class Found(NamedTuple):
    verdicts: SuiteResult
    given: list[list[int]]
    """The images that were attacked, batch by batch."""

    def attacked(self) -> list[int]:
        """Each image as often as it was attacked."""
        return sorted(number for rows in self.given for number in rows)


def judge(
    model: nn.Module,
    data: ImageData,
    world: World,
    folder: Path | None = None,
    *,
    bears: int | None = None,
    **options: Any,
) -> Found:
    """Three attacks in four rounds; after so many batches, everything ends."""
    given: list[list[int]] = []
    inner = {
        "square": Square(queries=20),
        "pgd": PGD(steps=1, step_size=0.03),
        "fab-t": FAB(steps=2),
    }
    one, two, three = suite_of(
        "three",
        {name: Spy(inner=attack, given=given, bears=bears) for name, attack in inner.items()},
    ).rounds
    attacks = Suite("three", (one, two, two._replace(turn=1), three))
    chosen: dict[str, Any] = {"threat": THREAT, "keep": True, "check": False} | options
    evaluation = assess(model, data, [attacks], world=world, folder=folder, **chosen)
    return Found(evaluation.suites["three"], given)


def parts(folder: Path) -> list[EvaluationPart]:
    (place,) = folder.iterdir()
    return list(SuiteProgress(place, {}).read())


def passes(verdicts: SuiteResult) -> dict[str, tuple[int, int]]:
    return {name: (cost.forwards, cost.backwards) for name, cost in verdicts.costs.items()}


@pytest.mark.parametrize(("bears", "batch"), [(0, 200), (3, 200), (8, 5), (17, 200), (25, 5)])
def test_an_interrupted_evaluation_goes_on_where_it_was(
    model: nn.Module, small_data: ImageData, world: World, tmp_path: Path, bears: int, batch: int
) -> None:
    """With other batches: the verdicts and the costs are those of an evaluation in one go, and what
    was finished is not done again."""
    whole = judge(model, small_data, world, batch=8)
    with pytest.raises(Stopped):
        judge(model, small_data, world, tmp_path, batch=8, bears=bears)
    before = parts(tmp_path)
    assert len(before) == bears
    again = judge(model, small_data, world, tmp_path, batch=batch)
    assert torch.equal(again.verdicts.broken_by, whole.verdicts.broken_by)
    assert all(count > 0 for count in again.verdicts.counts().values())
    assert passes(again.verdicts) == passes(whole.verdicts)
    spent = sum(part.cost.seconds for part in before)
    assert sum(cost.seconds for cost in again.verdicts.costs.values()) > spent
    done = [number for part in before for number in part.rows.tolist()]
    assert sorted(done + again.attacked()) == whole.attacked()


def test_examples_from_before_are_returned_as_well(
    model: nn.Module, small_data: ImageData, world: World, tmp_path: Path
) -> None:
    with pytest.raises(Stopped):
        judge(model, small_data, world, tmp_path, batch=8, bears=12)
    before = parts(tmp_path)
    again, _ = judge(model, small_data, world, tmp_path, batch=200)
    assert again.examples is not None
    assert any(part.broken.any() for part in before)
    for part in before:
        assert part.examples is not None
        assert torch.equal(again.examples[part.rows[part.broken]], part.examples)
    x, y = everything(small_data)
    fell = again.broken_by > 0
    with torch.no_grad():
        assert (model(again.examples).argmax(1) != y)[fell].all()
    assert float(THREAT.size(again.examples, x).max()) <= THREAT.eps + 1e-6
    assert torch.equal(again.examples[~fell], x[~fell])


def test_a_finished_evaluation_is_read_and_not_repeated(
    model: nn.Module, small_data: ImageData, world: World, tmp_path: Path
) -> None:
    first = judge(model, small_data, world, tmp_path, batch=16)
    again = judge(model, small_data, world, tmp_path, batch=7)
    assert again.given == []
    assert torch.equal(again.verdicts.broken_by, first.verdicts.broken_by)
    assert passes(again.verdicts) == passes(first.verdicts)
    for name, cost in first.verdicts.costs.items():
        assert again.verdicts.costs[name].seconds == pytest.approx(cost.seconds)
    assert first.verdicts.examples is not None and again.verdicts.examples is not None
    assert torch.equal(again.verdicts.examples, first.verdicts.examples)


def test_the_verdicts_are_there_to_read(
    model: nn.Module, small_data: ImageData, world: World, tmp_path: Path
) -> None:
    with pytest.raises(Stopped):
        judge(model, small_data, world, tmp_path, batch=8, bears=3)
    (place,) = tmp_path.iterdir()
    assert not (place / "verdicts.json").exists()
    result, _ = judge(model, small_data, world, tmp_path)
    assert json.loads((place / "verdicts.json").read_text()) == result.broken()
    about = json.loads((place / "about.json").read_text())
    assert about["suite"] == "three"
    assert len(about["rounds"]) == 4
    assert about["threat"] == {"norm": "linf", "eps": THREAT.eps}
    assert place.name.startswith("three-")


def test_a_progress_file_without_examples_is_small(
    model: nn.Module, small_data: ImageData, world: World, tmp_path: Path
) -> None:
    result, _ = judge(model, small_data, world, tmp_path, keep=False)
    assert result.examples is None
    assert all(part.examples is None for part in parts(tmp_path))


def test_clean_images_need_no_progress_file(
    model: nn.Module, small_data: ImageData, world: World, tmp_path: Path
) -> None:
    assess(
        model,
        small_data,
        ["clean"],
        threat=THREAT,
        world=world,
        folder=tmp_path / "none",
        check=False,
    )
    assert not (tmp_path / "none").exists()


def heavier(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1e-3
    return other


def with_pixel(data: ImageData) -> ImageData:
    images = data.tensor().clone()
    images[3, 0, 0, 0] = 0.5
    return ImageData.of(images, data.labels, classes=10)


def with_label(data: ImageData) -> ImageData:
    labels = data.labels.clone()
    labels[3] = (labels[3] + 1) % 10
    return ImageData.of(data.images, labels, classes=10)


Change = Callable[[nn.Module, ImageData], tuple[nn.Module, ImageData, dict[str, Any]]]
CHANGES: dict[str, tuple[str, Change]] = {
    "eps": ("threat", lambda m, d: (m, d, {"threat": ThreatModel(eps=0.07)})),
    "norm": ("threat", lambda m, d: (m, d, {"threat": ThreatModel(norm="l2", eps=0.08)})),
    "seed": ("seed", lambda m, d: (m, d, {"seed": 1})),
    "precision": ("precision", lambda m, d: (m, d, {"precision": "bfloat16"})),
    "examples": ("examples", lambda m, d: (m, d, {"keep": False})),
    "weights": ("weights", lambda m, d: (heavier(m), d, {})),
    "pixel": ("images", lambda m, d: (m, with_pixel(d), {})),
    "label": ("images", lambda m, d: (m, with_label(d), {})),
    "fewer images": ("images", lambda m, d: (m, d.take(torch.arange(59)), {})),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_evaluation_has_a_progress_file_of_its_own(
    model: nn.Module, small_data: ImageData, world: World, tmp_path: Path, change: str
) -> None:
    """And one that is made to share it is refused, with a word on what differs."""
    judge(model, small_data, world, tmp_path)
    (first,) = tmp_path.iterdir()
    before = sorted(path.name for path in first.iterdir())
    key, changed = CHANGES[change]
    other_model, data, options = changed(model, small_data)
    fresh, given = judge(other_model, data, world, None, **options)
    result, again = judge(other_model, data, world, tmp_path, **options)
    assert torch.equal(result.broken_by, fresh.broken_by)
    assert again == given
    (second,) = set(tmp_path.iterdir()) - {first}
    assert sorted(path.name for path in first.iterdir()) == before

    about = json.loads((second / "about.json").read_text())
    message = f"{first} contains another evaluation .* choose"
    with pytest.raises(ValueError, match=message) as refused:
        SuiteProgress(first, about).open()
    differs = re.search(r"\(differs in (.*)\)", str(refused.value))
    assert differs is not None and key in differs[1].split(", ")


def test_all_that_differs_is_named(tmp_path: Path) -> None:
    SuiteProgress(tmp_path / "it", {"seed": 1, "threat": {"eps": 0.1}, "old": 1}).open()
    with pytest.raises(ValueError, match=r"\(differs in new, old, seed\)"):
        SuiteProgress(tmp_path / "it", {"seed": 2, "threat": {"eps": 0.1}, "new": 1}).open()
    SuiteProgress(tmp_path / "it", {"old": 1, "threat": {"eps": 0.1}, "seed": 1}).open()


def test_other_settings_of_an_attack_make_another_evaluation(
    model: nn.Module, small_data: ImageData, world: World, tmp_path: Path
) -> None:
    for attack in (PGD(steps=1), PGD(steps=2), PGD(steps=2, loss="margin")):
        attacks = [suite_of("mine", {"pgd": attack})]
        assess(model, small_data, attacks, threat=THREAT, world=world, folder=tmp_path, check=False)
    assert len(list(tmp_path.glob("mine-*/verdicts.json"))) == 3


@pytest.mark.parametrize("text", ["", '{"seed": ', "[", "null", "3", "[1]", '"seed"', "\x00"])
def test_a_broken_description_is_refused(tmp_path: Path, text: str) -> None:
    progress_file = SuiteProgress(tmp_path / "it", {"seed": 1})
    progress_file.open()
    (tmp_path / "it" / "about.json").write_text(text)
    with pytest.raises(ValueError, match=r"about\.json: not valid; remove .* to start over"):
        progress_file.open()


def test_a_folder_of_something_else_is_refused(
    model: nn.Module, small_data: ImageData, world: World, tmp_path: Path
) -> None:
    judge(model, small_data, world, tmp_path)
    (place,) = tmp_path.iterdir()
    shutil.rmtree(place)
    place.mkdir()
    judge(model, small_data, world, tmp_path)  # an empty one is free
    shutil.rmtree(place)
    place.mkdir()
    (place / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=f"{place} exists and contains no evaluation"):
        judge(model, small_data, world, tmp_path)
    assert [path.name for path in place.iterdir()] == ["thesis.txt"]


def test_a_file_in_the_folders_place_is_refused(
    model: nn.Module, small_data: ImageData, world: World, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file"):
        judge(model, small_data, world, tmp_path / "file")


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _garble(path: Path) -> None:
    path.write_bytes(b"\xff" * 100)


def _another(path: Path) -> None:
    save_file({"weight": torch.ones(3)}, path)


def _without_costs(path: Path) -> None:
    save_file({"rows": torch.arange(3), "fell": torch.zeros(3, dtype=torch.uint8)}, path)


def _with_odd_costs(path: Path) -> None:
    tensors = {"rows": torch.arange(3), "fell": torch.zeros(3, dtype=torch.uint8)}
    save_file(tensors, path, {"seconds": "1", "forwards": "many", "backwards": "0"})


@pytest.mark.parametrize(
    "spoil", [_truncate, _empty, _garble, _another, _without_costs, _with_odd_costs]
)
def test_a_broken_part_is_named(
    model: nn.Module,
    small_data: ImageData,
    world: World,
    tmp_path: Path,
    spoil: Callable[[Path], None],
) -> None:
    judge(model, small_data, world, tmp_path, batch=16)
    victim = sorted(tmp_path.glob("*/*.safetensors"))[2]
    spoil(victim)
    with pytest.raises(ValueError, match=f"{victim}: not a file of an evaluation"):
        judge(model, small_data, world, tmp_path, batch=16)


def test_weights_among_the_parts_are_named(
    model: nn.Module, small_data: ImageData, world: World, tmp_path: Path
) -> None:
    judge(model, small_data, world, tmp_path)
    (place,) = tmp_path.iterdir()
    _without_costs(place / "best.safetensors")
    with pytest.raises(ValueError, match=r"best\.safetensors: not a file of an evaluation"):
        judge(model, small_data, world, tmp_path)


@pytest.mark.parametrize("name", ["000-1f.safetensors", "verdicts.json", "about.json"])
def test_half_a_file_beside_the_whole_ones_is_ignored(
    model: nn.Module, small_data: ImageData, world: World, tmp_path: Path, name: str
) -> None:
    with pytest.raises(Stopped):
        judge(model, small_data, world, tmp_path, batch=8, bears=3)
    (place,) = tmp_path.iterdir()
    (place / f".{name}.partial").write_bytes(b"hal")
    whole, _ = judge(model, small_data, world, None)
    again, _ = judge(model, small_data, world, tmp_path)
    assert torch.equal(again.broken_by, whole.broken_by)


def test_it_may_end_before_it_has_begun(tmp_path: Path) -> None:
    """Killed while the description was being written, it can be started again."""
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / ".about.json.partial").write_text('{"se')
    SuiteProgress(tmp_path / "it", {"seed": 1}).open()
    SuiteProgress(tmp_path / "it", {"seed": 1}).open()


def test_parts_come_back_as_they_were_written(tmp_path: Path) -> None:
    """Round by round."""
    progress_file = SuiteProgress(tmp_path / "deep" / "in", {})
    progress_file.open()
    rows = (torch.tensor([4, 1, 7]), torch.tensor([2]), torch.tensor([1, 7]))
    fell = (torch.tensor([False, True, False]), torch.tensor([True]), torch.tensor([False, False]))
    examples = (torch.rand(1, 1, 2, 2), torch.rand(1, 1, 2, 2), torch.zeros(0, 1, 2, 2))
    costs = (Cost(0.1, 3, 4), Cost(1 / 3, 2**40 + 1, 0), Cost())
    written = [
        EvaluationPart(*batch)
        for batch in zip((12, 0, 3), rows, fell, costs, examples, strict=True)
    ]
    for part in written:
        progress_file.write(part)
    read = list(progress_file.read())
    assert [part.round for part in read] == [0, 3, 12]
    for part in written:
        (other,) = (batch for batch in read if batch.round == part.round)
        assert other.cost == part.cost
        assert torch.equal(other.rows, part.rows)
        assert torch.equal(other.broken, part.broken)
        assert other.examples is not None and part.examples is not None
        assert torch.equal(other.examples, part.examples)
    assert {path.suffix for path in progress_file.folder.iterdir()} == {".safetensors", ".json"}


def test_large_counts_stay_exact(world: World, tmp_path: Path) -> None:
    """A batch of Square may take more passes than a float of 24 bits can count."""
    data, passes = white(1, 1, 1), 2**24 + 1
    progress_file = SuiteProgress(tmp_path / "it", {})
    progress_file.open()
    progress_file.write(
        EvaluationPart(0, torch.arange(3), torch.zeros(3).bool(), Cost(0.5, passes, passes))
    )
    model = Brightness()
    runner = Runner(model=model, network=model, data=data, threat=THREAT, world=world)
    rounds = suite_of("square", {"square": Square()}).rounds
    result = runner.run(rounds, torch.ones(3, dtype=torch.bool), progress_file)
    assert result.costs == {"square": Cost(0.5, passes, passes)}


def test_a_listing_tells_folders_apart(tmp_path: Path) -> None:
    """It is how workers find out that they do not share one."""
    one, two = (SuiteProgress(tmp_path / name, {}) for name in "ab")
    nothing = one.digest()
    one.open()
    assert one.digest() != nothing
    two.open()
    assert one.digest() == two.digest()
    two.write(EvaluationPart(0, torch.arange(2), torch.zeros(2).bool(), Cost()))
    assert one.digest() != two.digest()
    assert len(two.digest()) == 14  # fits 64 bits


class Odd(nn.Module):
    """Weights of every sort."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.brief = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.arange(6.0).reshape(2, 3).T)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("nothing", torch.zeros(0))


def _prints(model: nn.Module, data: ImageData) -> tuple[str, str]:
    prints = fingerprint(model, data, torch.eye(3))
    assert set(prints) == {"weights", "images", "answers"}
    return prints["weights"], prints["images"]


def test_a_fingerprint_changes_with_the_answers_but_not_with_their_rounding() -> None:
    model, data = Odd(), white(1, 0, 2)
    logits = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    before = fingerprint(model, data, logits)
    assert fingerprint(model, data, logits * 1.001) == before
    assert fingerprint(model, data, -logits)["answers"] != before["answers"]


def test_a_fingerprint_changes_with_any_weight() -> None:
    data, model = white(1, 0, 2), Odd()
    weights, images = _prints(model, data)
    for name, value in model.state_dict().items():
        if value.numel():
            other = copy.deepcopy(model)
            last, changed = (-1,) * value.dim(), other.state_dict()[name]
            changed[last] = ~value[last] if value.dtype == torch.bool else value[last] + 1
            assert _prints(other, data)[0] != weights, name
            assert _prints(other, data)[1] == images, name
    assert _prints(model.double(), data)[0] != weights


def test_a_fingerprint_changes_with_any_image_or_label() -> None:
    model, data = Odd(), white(1, 0, 2)
    weights, images = _prints(model, data)
    distinct = {images}
    for row in range(3):
        pixels, labels = data.tensor().clone(), data.labels.clone()
        pixels[row, 0, 1, 1] = 0.75
        labels[row] = (labels[row] + 1) % 3
        for other in (ImageData(pixels, data.labels, 3), ImageData(data.images, labels, 3)):
            prints = _prints(model, other)
            assert prints[0] == weights
            distinct.add(prints[1])
    distinct.add(_prints(model, data.take(torch.arange(2)))[1])
    distinct.add(_prints(model, data.take(torch.tensor([1, 0, 2])))[1])
    as_bytes = ImageData.of((255 * data.tensor()).to(torch.uint8), data.labels, classes=3)
    distinct.add(_prints(model, as_bytes)[1])
    assert len(distinct) == 10


def test_a_fingerprint_is_that_of_what_counts() -> None:
    """Not of a mode, of gradients, or of the object."""
    data, model = white(1, 0, 2), Odd()
    before = _prints(model, data)
    other = copy.deepcopy(model).eval()
    other.scale.grad = torch.tensor(1.0)
    assert _prints(other, white(1, 0, 2)) == before


class Shifted(nn.Module):
    """Another network on images that are normalized by numbers of which no state dict knows."""

    def __init__(self, net: nn.Module, mean: float) -> None:
        super().__init__()
        self.net, self.mean = net, mean

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x - self.mean)  # type: ignore[no-any-return]


def test_who_answers_otherwise_is_another(
    model: nn.Module, small_data: ImageData, world: World, tmp_path: Path
) -> None:
    """Weights alone do not make a network: what an older forward pass was found to withstand is not
    what a newer one does."""
    for mean in (0.0, 0.3):
        subject = Shifted(model, mean)
        result, _ = judge(subject, small_data, world, tmp_path)
        expected, _ = judge(subject, small_data, world, None)
        assert int(right(subject, small_data).sum()) == int((result.broken_by >= 0).sum())
        assert torch.equal(result.broken_by, expected.broken_by)
