"""A run that was interrupted anywhere ends with the bits of one that never was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dat.attacks import FGSM, NFGSM, PGD, Free
from dat.comm import Buckets, Chunked, World
from dat.compute import Compute
from dat.data import Augmentation, ImageData, split_holdout
from dat.objectives import TRADES
from dat.optim import LAMB, LARS, SGD, kernel
from dat.threat import ThreatModel
from dat.train import EpochRecord, Listener, NotFinite, Resumption, Saver, Trainer
from dat.train.checkpoint import all_checkpoints
from dat.train.growth import Growth
from dat.train.sentinel import Sentinel
from dat.train.step import StepReport


class Interruption(Exception):
    """As if the power went off."""


class Off(Listener):
    def __init__(self, at: int) -> None:
        self.at = at

    def step_ended(self, trainer: Trainer, epoch: int, report: StepReport) -> None:
        if trainer.updates == self.at:
            trainer.saver.close() if trainer.saver else None
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
    usual: dict[str, Any] = {
        "model": net,
        "data": train,
        "holdout": holdout,
        "threat": ThreatModel(eps=0.1),
        "attack": PGD(steps=2),
        "optimizer": LAMB(lr=0.02),
        "epochs": 3,
        "batch": 12,
        "seed": 4,
        "selection": PGD(steps=2),
        "world": world,
        "saver": Saver(root, every=1, keep=3) if root else None,
    }
    return Trainer(**usual | options)


@pytest.fixture(scope="module")
def world() -> Any:
    with World.join(device="cpu", threads=1) as joined:
        yield joined


def outcome(trainer: Trainer, records: list[EpochRecord]) -> dict[str, Any]:
    """Everything that must not differ; times do."""
    timed = {key for key in EpochRecord._fields if key.endswith("seconds")}
    told = [{k: v for k, v in it._asdict().items() if k not in timed} for it in records]
    states = {f"{n}{k}": v for n, m in trainer.models().items() for k, v in m.state_dict().items()}
    best = {k: v for n in trainer.models() for k, v in trainer.best_model(n).state_dict().items()}
    return {"records": told, "states": states, "best": best, "epoch": trainer.best_epoch()}


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
        "growth": Growth((1,), 2),
        "epochs": 4,
        "bn": "ghost",
        "ghost": 5,
    },
    "grown, free": {"attack": Free(replays=2), "growth": Growth((1,), 3), "epochs": 2},
    "rescued": {
        "attack": FGSM(),
        "sentinel": Sentinel(action="rescue", rescue=NFGSM(), drop=2.0, least=0.0),
    },
    "carried, rescued": {
        "attack": PGD(steps=1, carry=True),
        "sentinel": Sentinel(action="rescue", rescue=NFGSM(), drop=2.0, least=0.0),
    },
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("at", [2, 5, 9, 14])
def test_the_end_is_the_same(tmp_path: Path, world: World, name: str, at: int) -> None:
    whole = make(world, None, **CASES[name])
    expected = outcome(whole, whole.fit())
    first = make(world, tmp_path, **CASES[name], listeners=[Off(at)])
    with pytest.raises(Interruption):
        first.fit()
    found = Resumption.last(tmp_path, pytest.fail)
    assert found is not None and found.updates == at - 1
    second = make(world, tmp_path, **CASES[name])
    again = outcome(second, second.fit(found))
    assert equal(again, expected)
    assert second.updates == whole.updates


@pytest.mark.parametrize("native", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("optimizer", [LAMB(lr=0.02), LARS(lr=0.1)], ids=["lamb", "lars"])
def test_so_it_is_in_channels_last(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, optimizer: Any, native: bool
) -> None:
    """Moments are read back in the order of their weights, in which their norms are summed."""
    if not native:
        monkeypatch.setattr(kernel, "library", lambda: None)

    def trainer(root: Path | None, **options: Any) -> Trainer:
        torch.manual_seed(0)
        layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 3)
        compute = Compute(layout="channels-last")
        net = nn.Sequential(*layers)
        return make(world, root, model=net, optimizer=optimizer, compute=compute, **options)

    whole = trainer(None)
    expected = outcome(whole, whole.fit())
    with pytest.raises(Interruption):
        trainer(tmp_path, listeners=[Off(5)]).fit()
    second = trainer(tmp_path)
    assert equal(outcome(second, second.fit(Resumption.last(tmp_path, pytest.fail))), expected)
    assert not second.model.get_parameter("2.weight").is_contiguous()


def test_interrupted_again_and_again(tmp_path: Path, world: World) -> None:
    whole = make(world, None, ema=0.9)
    expected = outcome(whole, whole.fit())
    for at in (2, 3, 4, 11, 12, 13):
        with pytest.raises(Interruption):
            make(world, tmp_path, ema=0.9, listeners=[Off(at)]).fit(
                Resumption.last(tmp_path, pytest.fail)
            )
    last = make(world, tmp_path, ema=0.9)
    assert equal(outcome(last, last.fit(Resumption.last(tmp_path, pytest.fail))), expected)


def test_another_run_is_not_taken_up(tmp_path: Path, world: World) -> None:
    with pytest.raises(Interruption):
        make(world, tmp_path, listeners=[Off(2)]).fit()
    found = Resumption.last(tmp_path, pytest.fail)
    with pytest.raises(ValueError, match="is of a run on 72 images in batches of 12"):
        make(world, tmp_path, batch=6).fit(found)


def test_steps_of_another_size_are_not_taken_up(tmp_path: Path, world: World) -> None:
    with pytest.raises(Interruption):
        make(world, tmp_path, listeners=[Off(9)], growth=Growth((1,), 2)).fit()
    found = Resumption.last(tmp_path, pytest.fail)
    with pytest.raises(ValueError, match="whose updates take 2 batches, not 1"):
        make(world, tmp_path).fit(found)


def test_a_full_disk_is_told_and_the_last_good_one_stays(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dat.train import checkpoint

    told: list[str] = []
    original, count = checkpoint._put, 0

    def full(path: Path, raw: bytes) -> None:
        nonlocal count
        count += 1
        if count > 4:  # two whole checkpoints
            raise OSError(28, "No space left on device")
        original(path, raw)

    monkeypatch.setattr(checkpoint, "_put", full)
    trainer = make(world, tmp_path, epochs=1, saver=Saver(tmp_path, every=1, tell=told.append))
    assert len(trainer.fit()) == 1  # training goes on
    assert told and "No space left on device" in told[0] and "00000002" in told[0]
    assert [it.name for it in all_checkpoints(tmp_path)] == ["00000002", "00000001"]
    monkeypatch.undo()
    assert Resumption.last(tmp_path, pytest.fail) is not None


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
def test_a_broken_step_is_left_out_and_reported(
    tmp_path: Path, world: World, guard: str, attack: PGD
) -> None:
    said: list[str] = []

    class Hears(Listener):
        def left_out_step(self, trainer: Trainer, reason: str, count: int) -> None:
            said.append(reason)

    settings = {"guard": guard, "attack": attack, "epochs": 2, "listeners": [Hears()]}
    trainer = make(world, tmp_path, model=Breaks({8}), **settings)
    records = trainer.fit()
    assert len(records) == 2 and trainer.left_out == [[1, 1]]
    assert len(said) == 1 and "epoch 2, step 2: the loss is" in said[0]
    assert trainer.updates == 11
    assert all(it.isfinite().all() for it in trainer.model.state_dict().values())


def test_without_a_guard_it_stops_and_too_many_are_too_many(tmp_path: Path, world: World) -> None:
    with pytest.raises(NotFinite, match="epoch 1, step 3"):
        make(world, None, model=Breaks({3})).fit()
    always = make(world, None, model=Breaks(set(range(3, 99))), guard="skip", guard_most=4)
    with pytest.raises(NotFinite, match="epoch 2, step 1"):
        always.fit()
    assert len(always.left_out) == 4
