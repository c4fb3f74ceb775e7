"""Every network of the zoo through every public entry point."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import dat
from dat.attacks import attack_mode, suites
from dat.config.build import check_model
from dat.core.settings import SettingError
from dat.core.wrapper import ModelWrapper
from dat.data import ImageData
from dat.distributed import World
from dat.evaluation.progress_file import ABOUT, weights_of
from dat.jobs.selftrain import pseudo_labels
from dat.models import Adapted, adapted
from dat.train import load_weights
from dat.train.engine import Compute
from tests.trainers import make_trainer
from tests.zoo import (
    CHANNELS,
    CLASSES,
    SIZE,
    ZOO,
    Adapting,
    Lazy,
    Plain,
    Viewing,
    _with,
    state,
    unchanged,
)

THREAT = dat.ThreatModel(eps=0.05)
IMAGES = 12
NO_GRADIENT = "the model has no gradient with respect to its input"


@pytest.fixture(scope="module")
def world() -> World:
    return World.join(device="cpu")


@cache
def images() -> Tensor:
    return torch.rand(IMAGES, CHANNELS, SIZE, SIZE, generator=torch.Generator().manual_seed(1))


@cache
def labels() -> Tensor:
    """What the plain network says, so that it is always right."""
    with torch.no_grad():
        found: Tensor = ZOO["plain"].make().eval()(images()).argmax(1)
    return found


@cache
def data() -> ImageData:
    return ImageData.of(images(), labels(), classes=CLASSES)


def _evaluate(model: nn.Module, world: World) -> Any:
    return dat.evaluate(model, data(), threat=THREAT, attack=dat.PGD(steps=3), world=world)


def _assess(model: nn.Module, world: World) -> Any:
    names = ["pgd-3", "apgd-margin-3", "fab-t-2", "square-5"]
    found = dat.assess(model, data(), names, threat=THREAT, world=world, keep=True)
    for verdicts in found.suites.values():
        assert verdicts.examples is not None and verdicts.examples.dtype == torch.float32
        assert (verdicts.examples - images()).abs().max() <= THREAT.eps + 1e-6
    random = any("is randomized" in it for it in found.warnings)
    return random, {name: verdicts.broken_by.tolist() for name, verdicts in found.suites.items()}


def _folded(model: nn.Module, world: World) -> Any:
    """Enough to do that a copy is made."""
    data_ = ImageData.of(images().repeat(8, 1, 1, 1), labels().repeat(8), classes=CLASSES)
    found = dat.assess(model, data_, ["pgd-8"], threat=THREAT, world=world, check=False)
    return found.suites["pgd-8"].broken_by.tolist()


def _autoattack(model: nn.Module, world: World) -> Any:
    found = dat.autoattack(model, images()[:4], labels()[:4], eps=0.05, world=world)
    assert found.examples.dtype == torch.float32
    return found.broken_by


def _sweep(model: nn.Module, world: World) -> Any:
    return dat.sweep(
        model, data(), threat=THREAT, eps=[0.01, 0.05], steps=[1], at_steps=2, world=world
    )


def _certify(model: nn.Module, world: World) -> Any:
    found = dat.certify(model, data(), sigma=0.1, n0=16, n=64, batch=32, world=world)
    return [line.split("\t")[:4] for line in found.table().splitlines()]


def _predict(model: nn.Module, world: World) -> Any:
    return dat.predict(model, images()[:4], sigma=0.1, n=64, batch=32).tolist()


def _label(model: nn.Module, world: World) -> Any:
    return pseudo_labels(model, data(), world).labels.tolist()


ENTRIES: dict[str, Callable[[nn.Module, World], Any]] = {
    "evaluate": _evaluate,
    "assess": _assess,
    "folded": _folded,
    "autoattack": _autoattack,
    "sweep": _sweep,
    "certify": _certify,
    "predict": _predict,
    "label": _label,
}
WITHOUT_GRADIENTS = ("certify", "predict", "label")


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """AutoAttack with its attacks, a few steps each."""
    short = {
        "apgd-ce": dat.APGD(steps=3),
        "fab-t": dat.FAB(steps=2, targets=2),
        "square": dat.Square(queries=5),
    }
    monkeypatch.setitem(suites.SUITES, suites.AUTOATTACK, lambda classes: short)


@cache
def _expected(entry: str) -> Any:
    return ENTRIES[entry](ZOO["plain"].make(), World.join(device="cpu"))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", ZOO)
def test_every_network_through_every_entry(name: str, entry: str, world: World) -> None:
    exhibit = ZOO[name]
    model = exhibit.make().train()
    before = dict(state(model))
    if not exhibit.gradients and entry not in WITHOUT_GRADIENTS:
        with pytest.raises(ValueError, match=NO_GRADIENT):
            ENTRIES[entry](model, world)
    else:
        found = ENTRIES[entry](model, world)
        if exhibit.same:
            assert found == _expected(entry)
        if entry == "assess":
            assert found[0] is exhibit.random
    unchanged(model, before)


def test_search_attacks_what_gives_no_gradient(world: World) -> None:
    model = ZOO["detach"].make()
    found = dat.assess(model, data(), ["square-20"], threat=THREAT, world=world)
    plain = dat.assess(ZOO["plain"].make(), data(), ["square-20"], threat=THREAT, world=world)
    assert torch.equal(found.suites["square-20"].broken_by, plain.suites["square-20"].broken_by)
    assert any(it.startswith(NO_GRADIENT) for it in found.warnings)


def _trainer(model: nn.Module, world: World, **options: Any) -> dat.Trainer:
    return make_trainer(
        model=model,
        data=data(),
        threat=THREAT,
        attack=dat.PGD(steps=2),
        optimizer=dat.LAMB(lr=0.01),
        epochs=1,
        batch=IMAGES,
        world=world,
        **options,
    )


@pytest.mark.parametrize("name", ZOO)
def test_a_step_of_training(name: str, world: World) -> None:
    exhibit = ZOO[name]
    model = exhibit.make()
    before = {it: value.detach().clone() for it, value in model.named_parameters()}
    if exhibit.trains:
        (record,) = _trainer(model, world, holdout=data()).fit()
        assert record.loss == record.loss
        for it, parameter in model.named_parameters():
            assert parameter.dtype == before[it].dtype
            assert torch.equal(parameter, before[it]) is not parameter.requires_grad, it
    else:
        reasons = f"train them in float32|does not contribute to|{NO_GRADIENT}"
        with pytest.raises(ValueError, match=reasons):
            _trainer(model, world).fit()


def test_view_and_flatten_learn_the_same(world: World) -> None:
    twins = ZOO["plain"].make(), ZOO["view"].make()
    for model in twins:
        _trainer(model, world, compute=Compute(layout="given")).fit()
    for one, other in zip(*(it.parameters() for it in twins), strict=True):
        torch.testing.assert_close(one, other)


def test_view_refuses_channels_last(world: World) -> None:
    with pytest.raises(SettingError, match=r"compute.layout = channels-last: .*; use auto"):
        _trainer(ZOO["view"].make(), world, compute=Compute(layout="channels-last")).fit()


@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod."])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_weights_of_wrapped_models(tmp_path: Path, prefix: str, wrapped: bool, suffix: str) -> None:
    weights = {prefix + key: value for key, value in ZOO["plain"].make().state_dict().items()}
    path = tmp_path / f"net.{suffix}"
    if suffix == "pt":
        torch.save({"state_dict": weights}, path)
    else:
        save_file(weights, path)
    model: nn.Module = nn.DataParallel(Plain()) if wrapped else Plain()
    load_weights(model, path)
    for one, other in zip(model.parameters(), ZOO["plain"].make().parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("channels", [1, 3])
def test_view_of_grey_and_colored_images(channels: int, world: World) -> None:
    """Where there is one channel, it comes first and last."""
    x = torch.rand(80, channels, SIZE, SIZE, generator=torch.Generator().manual_seed(2))
    nets = Plain(channels).eval(), Viewing(channels).eval()
    nets[1].load_state_dict(nets[0].state_dict())
    with torch.no_grad():
        test = ImageData.of(x, nets[0](x).argmax(1), classes=CLASSES)
    fell = [
        dat.assess(net, test, ["pgd-10"], threat=THREAT, world=world).suites["pgd-10"].broken_by
        for net in nets
    ]
    assert torch.equal(*fell)
    certified = [
        dat.certify(net, test.take(torch.arange(4)), sigma=0.1, n0=16, n=64, batch=32, world=world)
        for net in nets
    ]
    assert torch.equal(*(it.radius for it in certified))


def test_a_model_that_needs_nothing_is_left_alone() -> None:
    model = ZOO["plain"].make()
    assert adapted(model, images()) is model


def test_an_error_of_the_model_is_reported(world: World) -> None:
    class Failing(Plain):
        def forward(self, x: Tensor) -> Any:
            raise RuntimeError("no such thing")

    with pytest.raises(ValueError, match=r"cannot take images of shape .* \(no such thing\)"):
        _evaluate(_with(Failing()), world)


def test_an_answer_without_logits_is_refused(world: World) -> None:
    class Empty(Plain):
        def forward(self, x: Tensor) -> Any:
            return {"scores": x}

    with pytest.raises(ValueError, match=r"the model gives dict for 12 images: must be"):
        _evaluate(_with(Empty()), world)


def test_running_statistics_written_in_eval_mode_are_restored(world: World) -> None:
    """torch updates them without raising their version."""
    model = _with(Adapting())
    before = dict(state(model))
    _evaluate(model, world)
    unchanged(model, before)


def test_restoring_leaves_earlier_graphs_valid() -> None:
    model = ZOO["plain"].make().eval()
    loss = model(images()).sum()
    with attack_mode(model):
        model(images())
    loss.backward()


def test_lazy_modules_are_evaluated(world: World) -> None:
    _evaluate(Lazy(), world)


def test_lazy_modules_can_be_trained(world: World) -> None:
    model = Lazy()
    check_model(model, data())  # as a run does first
    (record,) = _trainer(model, world).fit()
    assert record.loss == record.loss


def test_wrappers_are_known_by_their_class() -> None:
    """Not by their attributes: Python 3.12 no longer finds submodules among those."""
    smoothed = dat.Smoothed(ZOO["view"].make(), sigma=0.1)
    assert isinstance(smoothed, ModelWrapper)
    found = adapted(smoothed, images())
    assert isinstance(found, dat.Smoothed) and isinstance(found.network, Adapted)
    assert isinstance(found.network, ModelWrapper)
    assert not isinstance(nn.DataParallel(Plain()), ModelWrapper)


@pytest.mark.parametrize("bn", ["eval", "train"])
def test_a_tuple_in_training_mode_alone(bn: str, world: World) -> None:
    twins = ZOO["plain"].make(), ZOO["tuple-in-training"].make()
    for model in twins:
        _trainer(model, world, attack_bn=bn).fit()
    for one, other in zip(*(it.parameters() for it in twins), strict=True):
        assert torch.equal(one, other)


def test_running_out_of_memory_says_nothing_about_a_model() -> None:
    class Large(Plain):
        def forward(self, x: Tensor) -> Any:
            raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        adapted(Large(), images())


def _weights_noted(folder: Path) -> str:
    (path,) = folder.glob(f"*/{ABOUT}")
    return str(json.loads(path.read_text())["weights"])


@pytest.mark.parametrize("smoothed", [False, True])
def test_evaluations_note_the_weights_as_they_are_given(
    tmp_path: Path, world: World, smoothed: bool
) -> None:
    """Not as the adapter names them: the figures of an export would not find them."""
    model = ZOO["view"].make()
    if smoothed:
        model = dat.Smoothed(model, sigma=0.1, copies=2)
    dat.assess(
        model, data(), ["pgd-1"], threat=THREAT, world=world, folder=tmp_path / "evaluations"
    )
    dat.certify(
        model, data(), sigma=0.1, n0=8, n=8, batch=32, world=world, folder=tmp_path / "certificates"
    )
    for folder in tmp_path.iterdir():
        assert _weights_noted(folder) == weights_of(model), folder.name
