"""Reprs are short, and print no tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dat
from dat.core.rng import Streams
from dat.core.settings import Settings
from dat.data import CropWindows, PseudoLabels, RawBatch, Splits
from dat.distributed import Traffic
from dat.train import StepReport

LONGEST = 300
PACKAGES = (
    *("attacks", "data", "distributed", "evaluation"),
    *("export", "models", "objectives", "optim", "report", "train"),
)
THREAT = dat.ThreatModel(eps=0.1)
X = torch.rand(20, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(20) % 3


@cache
def network() -> nn.Module:
    return dat.build_model("preact-resnet18", 3, width=2).eval()


@cache
def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 3))


@cache
def data() -> dat.ImageData:
    return dat.ImageData.of(X, Y)


def assessed() -> dat.Assessment:
    return dat.assess(linear(), data(), ["fgsm", "pgd-1"], threat=THREAT, keep=True)


def trainer() -> dat.Trainer:
    return dat.Trainer(model=linear(), data=data(), threat=THREAT, epochs=1, batch=10)


def record() -> Any:
    fitted = trainer()
    fitted.fit()
    return fitted.records[0]


MADE: dict[str, Callable[[], object]] = {
    "AttackTarget": lambda: dat.AttackTarget(network(), Y, targets=X),
    "BoundAttack": lambda: dat.attacks.on(network(), "pgd-20"),
    "AutoAttackResult": lambda: dat.autoattack(linear(), X[:2], Y[:2], attacks=["apgd-ce"]),
    "Assessment": assessed,
    "SuiteResult": lambda: assessed().suites["pgd-1"],
    "Accuracy": lambda: dat.evaluate(linear(), data(), threat=THREAT, attack=dat.FGSM()),
    "Certified": lambda: dat.certify(linear(), data(), sigma=0.1, n0=8, n=8, batch=32),
    "Certified-radii": lambda: dat.certify(
        linear(), data(), sigma=0.1, n=8, batch=32, radii=[0.01 * step for step in range(1, 9)]
    ),
    "Curve": lambda: dat.sweep(linear(), data(), threat=THREAT, eps=[0.1] * 9, at_steps=1)[0],
    "Smoothed": lambda: dat.Smoothed(network(), sigma=0.1),
    "Normalize": lambda: dat.Normalize((0.1, 0.2, 0.3), (0.1, 0.2, 0.3)),
    "Resized": lambda: dat.Resized(network(), size=8),
    "Folded": lambda: dat.fold(network(), X),
    "Batch": lambda: dat.Batch.of(X, Y),
    "ImageData": data,
    "Splits": lambda: Splits(data(), data(), (0.1,), (0.2,)),
    "Stream": lambda: dat.Stream(iter([]), images=32, classes=10),
    "RawBatch": lambda: RawBatch(X, Y, Y, Y),
    "CropWindows": lambda: CropWindows(Y, Y, Y > 0),
    "PseudoLabels": lambda: PseudoLabels(Y, X[:, 0, 0, 0]),
    "Streams": lambda: Streams.of(0, "test", index=Y),
    "World": lambda: dat.World.current("cpu"),
    "LAMB": lambda: dat.LAMB(linear().parameters(), lr=0.1),
    "LALR": lambda: dat.LALR(linear().parameters(), lr=0.1),
    "ClassicLARS": lambda: dat.ClassicLARS(linear().parameters(), lr=0.1),
    "Muon": lambda: dat.Muon(linear().parameters(), lr=0.1),
    "EMA": lambda: dat.EMA(linear(), 0.9),
    "Exchange": lambda: dat.Exchange(linear(), dat.World.join()),
    "Trainer": trainer,
    "TrainingData": lambda: dat.TrainingData(labelled=data()),
    "RunFolder": lambda: dat.RunFolder(Path("run")),
    "EpochRecord": record,
    "StepReport": lambda: StepReport(1.0, 0.5, Traffic(1, 0.1, 0.1)),
}


def is_short(value: object) -> bool:
    text = repr(value)
    assert "tensor(" not in text, text
    assert len(text) < LONGEST, text
    return True


@pytest.mark.parametrize("name", MADE)
def test_what_holds_data_says_what_it_is(name: str) -> None:
    value = MADE[name]()
    assert is_short(value)


def without_arguments() -> list[type]:
    """Public classes that can be made from nothing."""
    modules = [dat, *(getattr(dat, package) for package in PACKAGES)]
    values = [getattr(module, name) for module in modules for name in module.__all__]
    kinds = {value for value in values if isinstance(value, type) and issubclass(value, Settings)}
    return sorted(kinds, key=lambda kind: kind.__qualname__)


@pytest.mark.parametrize("kind", without_arguments())
def test_settings_are_short(kind: type) -> None:
    if not getattr(kind, "__abstractmethods__", None):
        assert is_short(kind())


def test_reprs_name_what_differs_from_the_defaults() -> None:
    assert (
        repr(data()) == "ImageData(images=<float32 (20, 3, 8, 8)>, labels=<int64 (20,)>, classes=3)"
    )
    assert repr(dat.RunConfig(seed=3)) == "RunConfig(seed=3)"
    target = dat.AttackTarget(linear(), Y, until_broken=True)
    assert (
        repr(target) == "AttackTarget(model=<Sequential>, labels=<int64 (20,)>, until_broken=True)"
    )
    assert repr(dat.Smoothed(network(), sigma=0.1)) == (
        "Smoothed(sigma=0.1, copies=8, seed=0, network=<PreActResNet>)"
    )
    assert repr(assessed()).startswith("Assessment(20 images, TA ")
