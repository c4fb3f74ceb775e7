"""mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019), before the attack.

The partner of an image is the next one of its partition in the global batch. Partitions are in
random order, so this is a random image, and a worker has it or can read it, whatever the number of
workers. The attack and the update use the mixed labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from dat.core.losses import soft_labels
from dat.core.rng import derive
from dat.core.settings import SettingError, setting
from dat.train.part import Option

if TYPE_CHECKING:
    from torch import Tensor

    from dat.objectives import Batch
    from dat.train.trainer import Trainer
    from dat.train.worker import Worker

SWITCH = 0.5
"""Share of the batches that CutMix takes, if both are on."""


class Box(NamedTuple):
    """A rectangle of pixels; `bottom` and `right` are exclusive."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def area(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)


@dataclass(frozen=True, kw_only=True)
class Mixing(Option):
    """Mixes every image of a batch with another one; both mixtures have one weight per batch."""

    mixup: float = setting(
        0.0, "mixup: alpha of the weight's distribution Beta(alpha, alpha); 0: no mixup", ge=0
    )
    cutmix: float = setting(
        0.0,
        "CutMix: alpha of the weight's distribution; with train.mixup, each takes half of the "
        "batches; 0: no CutMix",
        ge=0,
    )

    @property
    def _shown(self) -> str:
        return f"train.mixup = {self.mixup:g}" if self.mixup else f"train.cutmix = {self.cutmix:g}"

    def check(self, trainer: Trainer) -> None:
        if not (self.mixup or self.cutmix):
            return
        conflict = trainer.attack.soft_labels_conflict() or trainer.objective.soft_labels_conflict()
        if trainer.attack.starts_from == "carried":
            conflict = "attack.carry needs the same images in every epoch; set it to false"
        if conflict:
            raise SettingError(f"{self._shown}: {conflict}")

    def build(self, trainer: Trainer) -> Mixing:
        """Refuse batches in which an image has no partner."""
        for sampler in (source.sampler for source in trainer.batches.sources):
            parts = len(sampler.sizes)
            if (self.mixup or self.cutmix) and sampler.batch < 2 * parts:
                raise SettingError(
                    f"{self._shown}: images are mixed within a partition, and {sampler.batch} per "
                    f"batch from {parts} partitions leave some without a partner; use train.batch "
                    f"= {2 * parts} or more, or fewer data.parts"
                )
        return self

    def on_batch(self, worker: Worker, batch: Batch, epoch: int, step: int) -> Batch:
        """Mix the images, and their labels."""
        if not (self.mixup or self.cutmix):
            return batch
        sampler = worker.sampler
        random = Random(derive(sampler.seed, "mixing", epoch, sampler.number(step)))
        other_x, other_y = sampler.partners(batch, epoch, step)
        cut = self.cutmix > 0 and (self.mixup == 0 or random.random() < SWITCH)
        alpha = self.cutmix if cut else self.mixup
        weight = random.betavariate(alpha, alpha)
        if cut:
            height, width = batch.x.shape[2:]
            box = random_box(height, width, 1 - weight, random)
            x, weight = paste(batch.x, other_x, box), 1 - box.area / (height * width)
        else:
            x = blend(batch.x, other_x, weight).clamp_(0, 1)  # rounding may exceed 1
        classes = sampler.batches.sources[0].data.classes
        y, other_y = soft_labels(batch.y, classes), soft_labels(other_y, classes)
        return batch.replaced(x, blend(y, other_y, weight))


def blend(one: Tensor, other: Tensor, weight: float) -> Tensor:
    """`weight` times one, plus the rest of the other."""
    return weight * one + (1 - weight) * other


def paste(x: Tensor, other: Tensor, box: Box) -> Tensor:
    """The images, with the contents of a box from others."""
    mixed, rows, columns = x.clone(), slice(box.top, box.bottom), slice(box.left, box.right)
    mixed[:, :, rows, columns] = other[:, :, rows, columns]
    return mixed


def random_box(height: int, width: int, area: float, random: Random) -> Box:
    """A box with this share of an image's area and its aspect ratio, centred anywhere and clipped
    at the border."""
    side = math.sqrt(area)
    half_height, half_width = int(height * side) // 2, int(width * side) // 2
    row, column = random.randrange(height), random.randrange(width)
    return Box(
        max(row - half_height, 0),
        min(row + half_height, height),
        max(column - half_width, 0),
        min(column + half_width, width),
    )
