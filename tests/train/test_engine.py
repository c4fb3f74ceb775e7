"""The engine does not change results beyond rounding."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dat.attacks import FGSM, PGD, Attack, Free
from dat.core.settings import SettingError
from dat.core.threat import ThreatModel
from dat.data import ImageData
from dat.distributed import World
from dat.distributed.world import SingleWorker
from dat.models import build_model, normalized
from dat.objectives import TRADES, Adversarial, GradAlign, Objective, Smooth
from dat.optim import SGD
from dat.train import Trainer
from dat.train.engine import Compute, Engine
from dat.train.step import dat_step
from tests.trainers import make_trainer

PLAIN = Compute(layout="given", fold=False)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join(device="cpu", threads=1) as joined:
        yield joined


def images(count: int = 12) -> ImageData:
    random = torch.Generator().manual_seed(3)
    x = torch.rand((count, 3, 8, 8), generator=random)
    return ImageData.of(x, torch.arange(count) % 4, classes=4)


def trainer(
    world: World,
    compute: Compute,
    model: nn.Module | None = None,
    attack: Attack | None = None,
    objective: Objective | None = None,
    **options: Any,
) -> Trainer:
    net = model or normalized(build_model("preact-resnet18", 4, width=8), [0.5] * 3, [0.25] * 3)
    made = make_trainer(
        model=net,
        data=images(),
        holdout=None,
        threat=ThreatModel(eps=0.05),
        attack=attack or PGD(steps=3),
        objective=objective or Adversarial(clean_weight=1.0),
        optimizer=SGD(lr=0.05),
        batch=12,
        epochs=1,
        world=world,
        compute=compute,
        **options,
    )
    made._join()
    return made


def stepped(made: Trainer, steps: int = 2) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of a few steps, and the state dict after them."""
    losses = [dat_step(made.worker, 0, step).loss for step in range(steps)]
    return losses, {name: value.clone() for name, value in made.model.state_dict().items()}


def check_same(one: Trainer, other: Trainer, *, rtol: float = 2e-3) -> None:
    (losses, state), (wanted, expected) = stepped(one), stepped(other)
    assert losses == pytest.approx(wanted, rel=rtol)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=20 * rtol, atol=rtol, msg=name)


@pytest.mark.parametrize("attack", [PGD(steps=3), FGSM()], ids=["pgd", "fgsm"])
@pytest.mark.parametrize(
    "objective", [Adversarial(), TRADES(), Smooth(sigma=0.1, copies=2)], ids=["at", "trades", "s"]
)
def test_layout_and_copy_change_nothing(world: World, attack: Attack, objective: Objective) -> None:
    fast = trainer(world, Compute(), attack=attack, objective=objective)
    assert fast.worker.engine.notes[:2] == ("channels last", "16 batch norms folded")
    check_same(fast, trainer(world, PLAIN, attack=attack, objective=objective), rtol=5e-3)


def test_the_folded_copy_follows_the_model(world: World) -> None:
    made = trainer(world, Compute())
    stepped(made, 3)
    x = images().tensor()
    copy = made.worker.engine.target(eval_mode=True)
    assert copy is not made.model and made.worker.engine.target(eval_mode=False) is made.model
    torch.testing.assert_close(copy(x), made.model.eval()(x), rtol=1e-4, atol=1e-4)


def cnn() -> nn.Module:
    """Without batch norms, which would see one piece at a time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 4))


CARRIED = PGD(steps=1, carry=True)


@pytest.mark.parametrize(
    "attack", [PGD(steps=2), Free(replays=2), CARRIED], ids=["pgd", "free", "carried"]
)
@pytest.mark.parametrize("objective", [Adversarial(clean_weight=1.0), TRADES()])
@pytest.mark.parametrize("pieces", [2, 5, 40])
def test_pieces_add_up_to_the_batch(
    world: World, attack: Attack, objective: Objective, pieces: int
) -> None:
    in_one = trainer(world, Compute(), cnn(), attack, objective)
    in_pieces = trainer(world, Compute(pieces=pieces), cnn(), attack, objective)
    assert [len(range(12)[piece]) for piece in in_pieces.worker.engine.pieces(12)] == {
        2: [6, 6],
        5: [2, 2, 3, 2, 3],
        40: [1] * 12,
    }[pieces]
    check_same(in_pieces, in_one, rtol=1e-5)


def test_pieces_work_with_awp(world: World) -> None:
    in_one = trainer(world, Compute(), cnn(), awp=0.01)
    check_same(trainer(world, Compute(pieces=3), cnn(), awp=0.01), in_one, rtol=1e-5)


def saved_bytes(made: Trainer) -> int:
    """The bytes that a forward pass saves for its backward pass."""
    total = 0

    def save(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    batch = made.worker.draw(0, 0)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        made.worker.backward(made.worker.forward(batch, batch.x), batch)
    return total


def test_recomputed_blocks_save_memory_and_change_no_bit(world: World) -> None:
    plain, recomputing = (trainer(world, Compute(recompute=on)) for on in (False, True))
    losses, state = stepped(recomputing)
    wanted, expected = stepped(plain)
    assert losses == wanted
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert saved_bytes(recomputing) < saved_bytes(plain) / 2
    assert "forward" not in vars(recomputing.worker.engine.blocks[0])  # restored


def test_recompute_needs_blocks(world: World) -> None:
    with pytest.raises(SettingError, match=r"compute.recompute: the model has no blocks"):
        trainer(world, Compute(recompute=True), cnn())


def test_mixed_precision_stays_close(world: World) -> None:
    low = trainer(world, Compute(precision="bfloat16"))
    assert low.worker.engine.notes[-1] == "bfloat16"
    losses, state = stepped(low)
    wanted, _ = stepped(trainer(world, Compute()))
    assert losses == pytest.approx(wanted, rel=0.05) and losses != wanted
    assert all(value.dtype != torch.bfloat16 for value in state.values())


class Viewing(nn.Module):
    """Flattens with `view`, which fails on channels-last tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 6, 3), nn.Linear(216, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.head(x.view(len(x), -1))  # type: ignore[no-any-return]


def test_a_network_that_fails_with_channels_last_keeps_its_layout(world: World) -> None:
    made = trainer(world, Compute(fold=False), Viewing())
    assert made.worker.engine.notes[0].startswith("not channels last: the model fails")
    stepped(made)
    with pytest.raises(SettingError, match=r"compute.layout = channels-last: the model fails"):
        trainer(world, Compute(layout="channels-last"), Viewing())


def test_a_network_that_would_crash_torch_keeps_its_layout(world: World) -> None:
    narrow = build_model("preact-resnet18", 4, width=4)
    made = trainer(world, Compute(), narrow)
    assert "a strided 1 x 1 convolution" in made.worker.engine.notes[0]
    stepped(made)
    with pytest.raises(SettingError, match=r"compute.layout = channels-last: torch may crash"):
        trainer(world, Compute(layout="channels-last"), narrow)


class Annealed(nn.Module):
    """Its output depends on something other than weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.temperature = cnn(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) / self.temperature  # type: ignore[no-any-return]


def test_a_copy_with_other_outputs_than_the_model_is_dropped(world: World) -> None:
    model, x = Annealed(), images().tensor()
    engine = Engine.of(model, Compute(), x, 0)
    assert engine.checked(world) is engine and engine.target(eval_mode=True) is not model
    model.temperature = 2.0
    changed = engine.checked(world)
    assert changed.target(eval_mode=True) is model and "dropped" in changed.notes[-1]


class OtherDisagrees(SingleWorker):
    """A second worker whose copy has other outputs."""

    def gather(self, values: Tensor) -> Tensor:
        return torch.stack([values, torch.zeros_like(values)])


def test_a_copy_is_dropped_by_all_workers_or_by_none(world: World) -> None:
    model, x = cnn(), images().tensor()
    engine = Engine.of(model, Compute(), x, 0)
    other = OtherDisagrees(0, 2, world.device, world.backend, False)
    assert engine.checked(other).target(eval_mode=True) is model


def test_auto_compiles_only_if_it_pays_off() -> None:
    model, x = cnn(), images().tensor()
    assert "compiled" not in " ".join(Engine.of(model, Compute(), x, 10**12).notes)  # a CPU
    with pytest.raises(SettingError, match=r"compute.compile = on: needs the folded copy"):
        Engine.of(model, Compute(compile="on", fold=False), x, 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of its own functions
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_a_compiled_update_has_the_same_results(world: World) -> None:
    """Attacks, evaluation and copies use the model as it is."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    made = trainer(world, Compute(compile_update=True), cnn(), objective=TRADES())
    assert "update compiled" in made.worker.engine.notes
    check_same(made, trainer(world, Compute(), cnn(), objective=TRADES()), rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert "forward" not in vars(made.model)


def test_a_network_that_cannot_be_compiled_is_named(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        def forward(x: Tensor) -> Tensor:
            raise torch._dynamo.exc.Unsupported("too dynamic\nand so on")

        return forward

    monkeypatch.setattr(torch, "compile", broken)
    made = trainer(world, Compute(compile_update=True), cnn())
    with pytest.raises(SettingError, match=r"compile_update = true: cannot .* \(too dynamic\)"):
        dat_step(made.worker, 0, 0)


@pytest.mark.parametrize(
    ("compute", "settings", "message"),
    [
        (Compute(compile_update=True, recompute=True), {}, "set compute.recompute = false"),
        (Compute(compile_update=True), {"objective": GradAlign()}, "second derivatives"),
        (Compute(compile_update=True), {"bn": "ghost"}, "use train.bn local"),
    ],
)
def test_what_a_compiled_update_does_not_support_is_refused(
    world: World, compute: Compute, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError, match=f"compute.compile_update = true: .*{message}"):
        trainer(world, compute, **settings)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of its own functions
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_a_compiled_copy_has_the_same_outputs_and_follows_the_model(world: World) -> None:
    made = trainer(world, Compute(compile="on"), cnn())
    assert "compiled" in made.worker.engine.notes
    check_same(made, trainer(world, Compute(), cnn()), rtol=1e-4)
