"""Step 4 of Algorithm A1: a worker draws its share of a batch from its own data."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dat.core.rng import Streams
from dat.core.threat import ThreatModel
from dat.data import Augmentation, Batches, CropWindows, RawBatch, as_floats
from dat.distributed import WorkerSubgroup
from dat.objectives import Batch
from dat.train.batch_schedule import BatchSchedule


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """D(i): the images of a worker, the order in which it draws them, and their augmentation."""

    batches: Batches
    threat: ThreatModel
    subgroup: WorkerSubgroup
    """The subgroup of workers that hold the same images."""
    device: torch.device
    augmentation: Augmentation = field(default_factory=Augmentation)
    schedule: BatchSchedule = field(default_factory=BatchSchedule)
    replays: int = 1
    """How many consecutive steps train on the same batch."""
    seed: int = 0

    def draw(self, epoch: int, step: int) -> Batch:
        """The worker's share of a global batch."""
        number, times = step // self.replays, self.schedule.batches(epoch)
        drawn = self.batches.draw_range(
            epoch, range(number * times, (number + 1) * times), self.device
        )
        x, y, index, weight = RawBatch.cat(drawn)
        return Batch(
            as_floats(self.augmentation(x, self._augment_draws(epoch, number, index))),
            y,
            Streams.of(self.seed, "objective", epoch, step, index=index),
            self.threat,
            self.subgroup,
            weight,
            total=times * self.batches.weight,
            lengths=tuple(len(share.y) for share in drawn),
        )

    def windows(self, epoch: int, number: int, index: Tensor) -> CropWindows | None:
        """The random crops of the images of a batch; None without crops."""
        return self.augmentation.windows(self._augment_draws(epoch, number, index))

    def _augment_draws(self, epoch: int, number: int, index: Tensor) -> Streams:
        return Streams.of(self.seed, "augment", epoch, number, index=index)
