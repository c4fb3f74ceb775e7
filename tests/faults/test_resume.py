"""A run that is interrupted anywhere and resumed ends with bitwise the same weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dat.attacks import FGSM, PGD, Free
from dat.core.threat import ThreatModel
from dat.data import Augmentation, ImageData, split_holdout
from dat.distributed import Buckets, Chunked, World
from dat.kernels import optimizer as kernel
from dat.objectives import TRADES
from dat.optim import LAMB, LARS, SGD, AdamW, Muon
from dat.train import Callback, Checkpoint, Checkpointer, EpochRecord, NotFinite, Trainer
from dat.train.checkpoint import all_checkpoints
from dat.train.engine import Compute
from dat.train.guard import Guard, SkippedSteps
from dat.train.overfitting_monitor import OverfittingMonitor
from dat.train.step import StepReport
from tests.trainers import make_trainer


class Interruption(Exception):
    """A simulated power failure."""


class InterruptAt(Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, trainer: Trainer, epoch: int, report: StepReport) -> None:
        if trainer.updates == self.at:
            if trainer.checkpointer:
                trainer.checkpointer.close()
            raise Interruption


def data(count: int = 90) -> ImageData:
    random = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 3, (count,), generator=random)
    images = torch.rand((count, 1, 6, 6), generator=random) * 0.5 + labels.reshape(-1, 1, 1, 1) / 6
    return ImageData.of(images.clamp(0, 1), labels, classes=3)


def make(world: World, root: Path | None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    train, holdout = split_holdout(data(), 0.2, 0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(64, 3),
    )
    if "resize" in options:
        net[3] = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten())
    defaults: dict[str, Any] = {
        "model": net,
        "data": train,
        "holdout": holdout,
        "threat": ThreatModel(eps=0.1),
        "attack": PGD(steps=2),
        "optimizer": LAMB(lr=0.02),
        "epochs": 3,
        "batch": 12,
        "seed": 4,
        "select_steps": 2,
        "world": world,
    }
    callbacks = options.pop("callbacks", [])
    if root and not any(isinstance(callback, Checkpointer) for callback in callbacks):
        callbacks = [*callbacks, Checkpointer(root, every=1, keep=3)]
    return make_trainer(**defaults | options, callbacks=callbacks)


@pytest.fixture(scope="module")
def world() -> Any:
    with World.join(device="cpu", threads=1) as joined:
        yield joined


def outcome(trainer: Trainer, records: list[EpochRecord]) -> dict[str, Any]:
    """Everything that must not differ; times may."""
    times = {key for key in EpochRecord._fields if key.endswith("seconds")}
    metrics = [{k: v for k, v in r._asdict().items() if k not in times} for r in records]
    states = {f"{n}{k}": v for n, m in trainer.models().items() for k, v in m.state_dict().items()}
    best = {k: v for n in trainer.models() for k, v in trainer.best_model(n).state_dict().items()}
    return {"records": metrics, "states": states, "best": best, "epoch": trainer.best_epoch()}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


CASES: dict[str, dict[str, Any]] = {
    "lamb": {},
    "averaged": {"ema": 0.9, "select_every": 2},
    "momentum": {"optimizer": SGD(lr=0.05, momentum=0.9), "objective": TRADES()},
    "lars": {"optimizer": LARS(lr=0.1), "attack": FGSM()},
    "adamw": {"optimizer": AdamW(lr=0.01), "attack": FGSM()},
    "muon": {"optimizer": Muon(lr=0.01), "attack": FGSM()},
    "free": {"attack": Free(replays=3), "epochs": 2},
    "error feedback": {
        "quantizer": Buckets(bits=4, error_feedback=True),
        "protocol": Chunked(),
    },
    "no holdout": {"holdout": None},
    "carried": {
        "attack": PGD(steps=1, carry=True, reset=2),
        "augmentation": Augmentation(kind="crop-flip"),
    },
    "carried, l2, early exit": {
        "attack": PGD(steps=3, carry=True, patience=1),
        "threat": ThreatModel(norm="l2", eps=0.5),
        "augmentation": Augmentation(kind="crop"),
    },
    "carried, unlabelled, error feedback": {
        "attack": PGD(steps=2, carry=True),
        "objective": TRADES(),
        "unlabelled": data(30).without_labels(),
        "quantizer": Buckets(bits=4, error_feedback=True),
        "protocol": Chunked(),
    },
    "grown, in groups": {
        "attack": PGD(steps=1, carry=True),
        "grow": (1,),
        "grow_by": 2,
        "epochs": 4,
        "bn": "ghost",
        "ghost": 5,
    },
    "grown, free": {"attack": Free(replays=2), "grow": (1,), "grow_by": 3, "epochs": 2},
    "float16, error feedback": {
        "compute": Compute(precision="float16"),
        "loss_scale": 2.0**18,
        "loss_scale_interval": 5,
        "quantizer": Buckets(bits=4, error_feedback=True),
        "protocol": Chunked(),
        "ema": 0.9,
    },
    "float16, free": {
        "compute": Compute(precision="float16"),
        "loss_scale": 2.0**20,
        "loss_scale_interval": 7,
        "attack": Free(replays=3),
        "epochs": 2,
    },
    "mixed, erased": {
        "mixup": 0.8,
        "cutmix": 1.0,
        "eps_warmup": 2.0,
        "augmentation": Augmentation(kind="crop-flip", jitter=0.4, erasing=0.5),
        "ema": 0.9,
        "ema_warmup": False,
    },
    "mixed, free": {"attack": Free(replays=3), "mixup": 0.8, "eps_warmup": 1.0, "epochs": 2},
    "small first": {"resize": (4, 5), "resize_until": (1, 2), "objective": TRADES()},
    "rescued": {
        "attack": FGSM(),
        "overfitting_monitor": OverfittingMonitor(action="rescue", drop=2.0, least=0.0),
    },
    "carried, rescued": {
        "attack": PGD(steps=1, carry=True),
        "overfitting_monitor": OverfittingMonitor(action="rescue", drop=2.0, least=0.0),
    },
}


@pytest.fixture(scope="module")
def undisturbed(world: World) -> Callable[[str], tuple[dict[str, Any], int]]:
    """The outcome of a case without interruption, and its number of updates."""

    @cache
    def end(name: str) -> tuple[dict[str, Any], int]:
        trainer = make(world, None, **CASES[name])
        return outcome(trainer, trainer.fit()), trainer.updates

    return end


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("at", [2, slow(5), slow(9), 14])
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_ends_with_the_same_bits(
    tmp_path: Path,
    world: World,
    undisturbed: Callable[[str], tuple[dict[str, Any], int]],
    name: str,
    at: int,
) -> None:
    """Interrupted in the first epoch, when DDP has just reordered its buckets, and in a later one,
    when batches have grown, perturbations carry over and the best weights are older."""
    expected, updates = undisturbed(name)
    first = make(world, tmp_path, **CASES[name], callbacks=[InterruptAt(at)])
    with pytest.raises(Interruption):
        first.fit()
    last = Checkpoint.last(tmp_path, pytest.fail)
    assert last is not None and last.updates == at - 1
    second = make(world, tmp_path, **CASES[name])
    assert equal(outcome(second, second.fit(last)), expected)
    assert second.updates == updates


@pytest.mark.parametrize("native", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize(
    "optimizer", [LAMB(lr=0.02), LARS(lr=0.1), Muon(lr=0.01)], ids=["lamb", "lars", "muon"]
)
def test_a_resumed_run_in_channels_last_ends_with_the_same_bits(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, optimizer: Any, native: bool
) -> None:
    """Moments get the memory format of their weights, in which their norms are summed."""
    if not native:
        monkeypatch.setattr(kernel, "library", lambda: None)

    def trainer(root: Path | None, **options: Any) -> Trainer:
        torch.manual_seed(0)
        layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 3)
        compute = Compute(layout="channels-last")
        net = nn.Sequential(*layers)
        return make(world, root, model=net, optimizer=optimizer, compute=compute, **options)

    uninterrupted = trainer(None)
    expected = outcome(uninterrupted, uninterrupted.fit())
    with pytest.raises(Interruption):
        trainer(tmp_path, callbacks=[InterruptAt(5)]).fit()
    second = trainer(tmp_path)
    assert equal(outcome(second, second.fit(Checkpoint.last(tmp_path, pytest.fail))), expected)
    assert not second.model.get_parameter("2.weight").is_contiguous()


def test_interrupted_again_and_again(tmp_path: Path, world: World) -> None:
    uninterrupted = make(world, None, ema=0.9)
    expected = outcome(uninterrupted, uninterrupted.fit())
    for at in (2, 3, 4, 11, 12, 13):
        with pytest.raises(Interruption):
            make(world, tmp_path, ema=0.9, callbacks=[InterruptAt(at)]).fit(
                Checkpoint.last(tmp_path, pytest.fail)
            )
    last = make(world, tmp_path, ema=0.9)
    assert equal(outcome(last, last.fit(Checkpoint.last(tmp_path, pytest.fail))), expected)


def test_the_checkpoint_of_another_run_is_refused(tmp_path: Path, world: World) -> None:
    with pytest.raises(Interruption):
        make(world, tmp_path, callbacks=[InterruptAt(2)]).fit()
    last = Checkpoint.last(tmp_path, pytest.fail)
    with pytest.raises(ValueError, match="belongs to a run on 72 images in batches of 12"):
        make(world, tmp_path, batch=6).fit(last)


def test_the_batch_schedule_cannot_change_within_an_epoch(tmp_path: Path, world: World) -> None:
    with pytest.raises(Interruption):
        make(world, tmp_path, callbacks=[InterruptAt(9)], grow=(1,), grow_by=2).fit()
    last = Checkpoint.last(tmp_path, pytest.fail)
    with pytest.raises(ValueError, match="whose updates take 2 batches, not 1"):
        make(world, tmp_path).fit(last)


def test_a_full_disk_is_reported_and_the_last_good_checkpoint_is_kept(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dat.train import checkpoint

    reports: list[str] = []
    original, count = checkpoint._write_synced, 0

    def full(path: Path, raw: bytes) -> None:
        nonlocal count
        count += 1
        if count > 4:  # two complete checkpoints
            raise OSError(28, "No space left on device")
        original(path, raw)

    monkeypatch.setattr(checkpoint, "_write_synced", full)
    checkpointer = Checkpointer(tmp_path, every=1, report=reports.append)
    trainer = make(world, tmp_path, epochs=1, callbacks=[checkpointer])
    assert len(trainer.fit()) == 1  # training continues
    assert reports and "No space left on device" in reports[0] and "00000002" in reports[0]
    assert [path.name for path in all_checkpoints(tmp_path)] == ["00000002", "00000001"]
    monkeypatch.undo()
    assert Checkpoint.last(tmp_path, pytest.fail) is not None


class Breaks(nn.Module):
    """Not finite in its n-th training pass."""

    def __init__(self, at: set[int]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(36, 3))
        self.at, self.passes = at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        broken = self.training and self.passes in self.at
        logits: torch.Tensor = self.net(x * (float("inf") if broken else 1.0))
        return logits


@pytest.mark.parametrize("guard", ["skip", "rollback"])
@pytest.mark.parametrize("attack", [PGD(steps=2), PGD(steps=2, carry=True)])
def test_a_step_that_is_not_finite_is_skipped_and_reported(
    tmp_path: Path, world: World, guard: str, attack: PGD
) -> None:
    reasons: list[str] = []

    class RecordsSkips(Callback):
        def on_step_skipped(self, trainer: Trainer, reason: str, count: int) -> None:
            reasons.append(reason)

    settings = {"guard": guard, "attack": attack, "epochs": 2, "callbacks": [RecordsSkips()]}
    trainer = make(world, tmp_path, model=Breaks({8}), **settings)
    records = trainer.fit()
    assert len(records) == 2 and trainer.parts.one(SkippedSteps).steps == [[1, 1]]
    assert len(reasons) == 1 and "epoch 2, step 2: the loss is" in reasons[0]
    assert trainer.updates == 11
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())


def test_without_a_guard_or_after_too_many_skips_the_run_stops(
    tmp_path: Path, world: World
) -> None:
    with pytest.raises(NotFinite, match="epoch 1, step 3"):
        make(world, None, model=Breaks({3})).fit()
    always = make(world, None, model=Breaks(set(range(3, 99))), guard=Guard(action="skip", most=4))
    with pytest.raises(NotFinite, match="epoch 2, step 1"):
        always.fit()
    assert len(always.parts.one(SkippedSteps).steps) == 4
