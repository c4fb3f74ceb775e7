"""Test accuracy (TA) and robust accuracy (RA) under one attack."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from dat.attacks import PGD, Attack
from dat.comm import World
from dat.data import ImageData
from dat.evaluation.assess import assess
from dat.evaluation.suites import suite_of
from dat.evaluation.survey import Progress, silent
from dat.threat import ThreatModel


class Accuracy(NamedTuple):
    """Counts over a whole set."""

    images: int
    clean: int
    """Right without an attack."""
    robust: int
    """Right without an attack and after every one that was tried."""

    @property
    def ta(self) -> float:
        """Test accuracy in percent."""
        return 100.0 * self.clean / self.images

    @property
    def ra(self) -> float:
        """Robust accuracy in percent."""
        return 100.0 * self.robust / self.images


def evaluate(
    model: nn.Module,
    data: ImageData,
    *,
    threat: ThreatModel,
    attack: Attack | None = None,
    restarts: int = 1,
    batch: int = 256,
    seed: int = 0,
    world: World | None = None,
    progress: Progress = silent,
) -> Accuracy:
    """TA and RA of a model that maps images in [0, 1] to logits; the default attack is PGD-20.

    A sample is robust when it survives each of `restarts` independent attacks. Called by every
    worker of `world`; each judges its share and all get the same counts.
    """
    if restarts < 1 or batch < 1:
        raise ValueError(f"restarts = {restarts}, batch = {batch}: must be at least 1")
    attack = PGD(steps=20) if attack is None else attack
    found = assess(
        model,
        data,
        [suite_of("attack", {"attack": attack}, restarts)],
        threat=threat,
        world=world_of(model) if world is None else world,
        batch=batch,
        seed=seed,
        check=False,
        progress=progress,
    )
    standing = int(found.suites["attack"].standing.sum())
    return Accuracy(found.images, int(found.right.sum()), standing)


def world_of(model: nn.Module) -> World:
    """The workers there are, on the model's device. The group that this joins is there for later
    calls, and closed at exit."""
    parameter = next(model.parameters(), None)
    return World.join(device="auto" if parameter is None else str(parameter.device))
