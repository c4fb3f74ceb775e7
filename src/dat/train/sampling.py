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
        number, numbers = self.number(step), self._numbers(epoch, step)
        drawn = self.batches.draw_range(epoch, numbers, self.device)
        raw = RawBatch.cat(drawn)
        return Batch(
            self._augmented(raw, epoch, number),
            raw.y,
            Streams.of(self.seed, "objective", epoch, step, index=raw.numbers),
            self.threat,
            self.subgroup,
            raw.weight,
            total=len(numbers) * self.batches.weight,
            lengths=tuple(len(share.y) for share in drawn),
        )

    def partners(self, batch: Batch, epoch: int, step: int) -> tuple[Tensor, Tensor]:
        """For each image of a batch as drawn, another image of its partition in the same global
        batch, augmented as it is there, and its label."""
        x, y, rows, first, end = [batch.x], [batch.y], list[Tensor](), 0, len(batch.y)
        for length, number in zip(batch.lengths, self._numbers(epoch, step), strict=True):
            row, extra = self.batches.partners(epoch, number, self.device)
            rows.append(torch.where(row < length, row + first, row - length + end))
            if extra is not None:
                x.append(self._augmented(extra, epoch, self.number(step)))
                y.append(extra.y)
                end += len(extra.y)
            first += length
        chosen = torch.cat(rows)
        return torch.cat(x).index_select(0, chosen), torch.cat(y).index_select(0, chosen)

    def number(self, step: int) -> int:
        """The number of a step's batch in the epoch, which replays have in common."""
        return step // self.replays

    def _numbers(self, epoch: int, step: int) -> range:
        """The global batches that a step's batch consists of."""
        number, times = self.number(step), self.schedule.batches(epoch)
        return range(number * times, (number + 1) * times)

    def _augmented(self, raw: RawBatch, epoch: int, number: int) -> Tensor:
        draws = self._augment_draws(epoch, number, raw.numbers)
        return as_floats(self.augmentation(raw.x, draws))

    def windows(self, epoch: int, number: int, index: Tensor) -> CropWindows | None:
        """The random crops of the images of a batch; None without crops."""
        return self.augmentation.windows(self._augment_draws(epoch, number, index))

    def _augment_draws(self, epoch: int, number: int, index: Tensor) -> Streams:
        return Streams.of(self.seed, "augment", epoch, number, index=index)
