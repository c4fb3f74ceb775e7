"""Test accuracy (TA) and robust accuracy (RA) of a model: the one verb for measuring them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, overload

from torch import nn

from dat.attacks import PGD, Attack
from dat.attacks.suites import Suite, suite_of
from dat.core.progress import Progress
from dat.core.threat import ThreatModel
from dat.data import Data, image_data
from dat.distributed import World
from dat.evaluation.assess import Assessment, assess
from dat.evaluation.workers import world_of


class Accuracy(NamedTuple):
    """Counts over a whole dataset."""

    images: int
    clean: int
    """Images classified correctly without an attack."""
    robust: int
    """Images classified correctly without an attack and after every attack."""

    @property
    def ta(self) -> float:
        """Test accuracy in percent."""
        return 100.0 * self.clean / self.images

    @property
    def ra(self) -> float:
        """Robust accuracy in percent."""
        return 100.0 * self.robust / self.images


@overload
def evaluate(
    model: nn.Module,
    data: Data,
    *,
    threat: ThreatModel,
    attack: Attack | None = None,
    restarts: int = 1,
    batch: int = 256,
    seed: int = 0,
    world: World | None = None,
    progress: Progress | bool = False,
) -> Accuracy: ...


@overload
def evaluate(
    model: nn.Module,
    data: Data,
    *,
    threat: ThreatModel,
    attacks: Sequence[str | Suite],
    batch: int = 256,
    seed: int = 0,
    precision: str = "float32",
    folder: Path | None = None,
    keep: bool = False,
    check: bool = True,
    bundle: Path | str | None = None,
    world: World | None = None,
    progress: Progress | bool = False,
) -> Assessment: ...


def evaluate(
    model: nn.Module,
    data: Data,
    *,
    threat: ThreatModel,
    attack: Attack | None = None,
    restarts: int = 1,
    attacks: Sequence[str | Suite] | None = None,
    batch: int = 256,
    seed: int = 0,
    precision: str = "float32",
    folder: Path | None = None,
    keep: bool = False,
    check: bool | None = None,
    bundle: Path | str | None = None,
    world: World | None = None,
    progress: Progress | bool = False,
) -> Accuracy | Assessment:
    """TA and RA of a model that maps images in [0, 1] to logits.

    Under one `attack` (default: PGD with 20 steps), an image is robust if it survives each of
    `restarts` independent runs, and the result is an `Accuracy`.

    With `attacks`, a list of names such as `["pgd-20", "autoattack"]`, every suite attacks all
    images that are classified correctly, and the result is an `Assessment`. Only then, `check`
    looks for signs of gradient masking, `keep` keeps the adversarial examples, a lower `precision`
    runs the attacks in mixed precision (the given model still decides), a `folder` shared by all
    workers lets an interrupted evaluation resume, and `bundle` is a file for the evidence that
    `dat.verify` checks.

    `progress=True` draws a bar; a function is called with the work done and the total.

    `data` is an `ImageData`, a map-style dataset, a data loader, or a pair (images, labels). All
    workers of `world` call this; each evaluates its share, and all get the same result.
    """
    data = image_data(data)
    if restarts < 1 or batch < 1:
        raise ValueError(f"restarts = {restarts}, batch = {batch}: must be at least 1")
    world = world_of(model) if world is None else world
    if attacks is not None:
        if attack is not None or restarts != 1:
            raise ValueError("attacks: replaces attack and restarts; give one or the other")
        return assess(
            model,
            data,
            attacks,
            threat=threat,
            world=world,
            batch=batch,
            seed=seed,
            precision=precision,
            folder=folder,
            keep=keep,
            check=check is not False,
            bundle=bundle,
            progress=progress,
        )
    if precision != "float32" or keep or any(it is not None for it in (folder, check, bundle)):
        raise ValueError("precision, folder, keep, check and bundle: need attacks=[...]")
    attack = PGD(steps=20) if attack is None else attack
    evaluation = assess(
        model,
        data,
        [suite_of("attack", {"attack": attack}, restarts)],
        threat=threat,
        world=world,
        batch=batch,
        seed=seed,
        check=False,
        progress=progress,
    )
    robust = int(evaluation.suites["attack"].robust.sum())
    return Accuracy(evaluation.images, int(evaluation.right.sum()), robust)
