"""The time of attack and update, and the callbacks of a step's stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from dat.attacks import PGD
from dat.core.tracing import stage, watched
from dat.data import ImageData
from dat.distributed import World
from dat.optim import LAMB, SGD, OptimizerSettings
from dat.train import EpochRecord
from dat.train.timing import StepTimer
from tests.trainers import make_trainer


def trained(optimizer: OptimizerSettings) -> EpochRecord:
    random = torch.Generator().manual_seed(0)
    images = torch.rand(24, 1, 4, 4, generator=random)
    data = ImageData.of(images, torch.arange(24) % 3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    with World.join(device="cpu", threads=1) as world:
        trainer = make_trainer(
            model=model,
            data=data,
            attack=PGD(steps=3),
            optimizer=optimizer,
            epochs=1,
            batch=12,
            world=world,
        )
        (record,) = trainer.fit()
    return record


def test_attack_and_update_are_parts_of_an_epoch() -> None:
    record = trained(LAMB(lr=0.01))
    assert record.attack_seconds > 0
    assert record.update_seconds > 0
    assert record.attack_seconds + record.update_seconds <= record.seconds


def test_an_epoch_records_the_trust_ratios_of_its_last_step() -> None:
    ratios = trained(LAMB(lr=0.01)).trust_ratios
    assert ratios is not None
    assert {"1.weight", "3.weight"} <= set(ratios)
    assert all(ratio > 0 for ratio in ratios.values())
    assert trained(SGD(lr=0.01)).trust_ratios is None


class Clock:
    """Each reading is a second later."""

    now = 0.0

    def mark(self) -> object:
        self.now += 1
        return self.now

    def seconds(self, start: object, end: object) -> tuple[float, float]:
        assert isinstance(start, float) and isinstance(end, float)
        return start, end


def test_nested_stages_are_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = StepTimer(torch.device("cpu"))
    monkeypatch.setattr(timer, "_clock", Clock())
    with watched(timer):
        with stage("attack"), stage("forward"):
            pass
        for name in ("update/forward", "update/backward", "optimizer", "data"):
            with stage(name):
                pass
    assert timer.read() == {"attack": 1.0, "update": 3.0}
    assert timer.read() == {"attack": 0.0, "update": 0.0}


def test_all_watchers_are_called() -> None:
    calls: list[str] = []

    def watcher(name: str):  # type: ignore[no-untyped-def]
        @contextmanager
        def watch(stage: str) -> Iterator[None]:
            calls.append(f"{name} begins {stage}")
            yield
            calls.append(f"{name} ends {stage}")

        return watch

    with watched(watcher("a")), watched(watcher("b")), stage("x"):
        pass
    assert calls == ["a begins x", "b begins x", "b ends x", "a ends x"]
