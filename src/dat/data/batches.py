"""Batches of a worker, drawn from its share of one or two datasets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dat.core import devices
from dat.core.rng import Streams, derive
from dat.core.short_repr import short_repr
from dat.data.images import ImageData
from dat.data.lazy_images import LazyImages, read, read_random
from dat.data.loader import Loader
from dat.data.local import Partitions
from dat.data.partitions import PartitionSampler


class RawBatch(NamedTuple):
    """A worker's share of a global batch, before augmentation."""

    x: Tensor
    """As stored: uint8, or floats in [0, 1]."""
    y: Tensor
    numbers: Tensor
    """Global sample indices; those of a second dataset follow those of the first."""
    weight: Tensor
    """Weight of each sample in the loss."""

    def __repr__(self) -> str:
        return short_repr(self)

    @classmethod
    def cat(cls, batches: Sequence[RawBatch]) -> RawBatch:
        """Concatenate batches."""
        return batches[0] if len(batches) == 1 else cls(*map(torch.cat, zip(*batches, strict=True)))

    def to(self, device: torch.device) -> RawBatch:
        return RawBatch(*(tensor.to(device, non_blocking=True) for tensor in self))


class Partners(NamedTuple):
    """The image that each image of a batch is mixed with."""

    rows: Tensor
    """Rows of the batch, followed by those of `extra`."""
    extra: RawBatch | None
    """Images that other workers draw from a partition that they share with this one."""


@dataclass(frozen=True)
class BatchSource:
    """A worker's share of a dataset, and which of its samples go into which batch."""

    data: ImageData
    """With the images' indices in the whole dataset."""
    sampler: PartitionSampler
    rank: int
    """The worker's rank in the sampler."""
    weight: float = 1.0
    offset: int = 0
    """Global index of the dataset's first image."""
    crops: int | None = None
    """Seed of random reads: crops of pictures, a dataset's own transforms; None: reads are not
    random."""

    __repr__ = short_repr

    @classmethod
    def of(cls, data: ImageData | Partitions, sampler: PartitionSampler, rank: int) -> BatchSource:
        """The share of the worker with that rank."""
        if isinstance(data, Partitions):
            return cls(data.collect(sampler, rank), sampler, rank)
        owned = sampler.owned(rank)
        return cls(replace(data.take(owned), numbers=owned), sampler, rank)

    def read(self, number: int) -> RawBatch:
        """The worker's share of batch `number`, which counts on across epochs."""
        return self.read_samples(number, self.drawn(number))

    def drawn(self, number: int, *, shift: int = 0) -> Tensor:
        """The samples of the worker's share of a batch, or those `shift` positions further on."""
        return self.sampler.draw(*divmod(number, self.sampler.steps), self.rank, shift=shift)

    def read_samples(self, number: int, index: Tensor) -> RawBatch:
        """Samples of a batch."""
        assert self.data.numbers is not None
        rows = torch.searchsorted(self.data.numbers, index)
        images, weight = self.data.images, self.sampler.weights(index)
        if self.crops is None:
            x = read(images, rows)
        else:
            x = read_random(images, rows, Streams(derive(self.crops, "crop", number), index))
        scale = torch.full((len(index),), self.weight)
        weight = scale if weight is None else scale * weight
        return RawBatch(x, self.data.labels[rows], index + self.offset, weight)


@dataclass(frozen=True)
class Batches:
    """Batches made of samples from each source."""

    sources: Sequence[BatchSource]
    steps: int
    """Batches per epoch."""
    loaders: int = 0
    """Number of processes that decode pictures; 0: this process decodes them."""
    _loader: list[Loader[RawBatch]] = field(default_factory=list)

    __repr__ = short_repr

    @property
    def weight(self) -> float:
        """Total weight of a global batch."""
        return sum(source.sampler.batch * source.weight for source in self.sources)

    def draw(self, epoch: int, step: int, device: torch.device) -> RawBatch:
        """The worker's share of a global batch."""
        return self.draw_range(epoch, range(step, step + 1), device)[0]

    def draw_range(self, epoch: int, steps: range, device: torch.device) -> list[RawBatch]:
        """The worker's shares of consecutive global batches."""
        if not self._loader:
            images = [source.data.images for source in self.sources]
            slow = any(isinstance(lazy, LazyImages) and lazy.slow for lazy in images)
            read_batch = partial(_read_batch, tuple(self.sources))
            self._loader.append(
                Loader(read_batch, self.loaders if slow else 0, pin=devices.pins_memory(device))
            )
        first = epoch * self.steps
        numbers = range(first + steps.start, first + steps.stop)
        return [batch.to(device) for batch in self._loader[0].read_range(numbers)]

    def partners(self, epoch: int, step: int, device: torch.device) -> Partners:
        """For each image of the worker's share of a global batch, the next one of the same
        partition in that batch, which is a random one, the same for any number of workers."""
        number = epoch * self.steps + step
        rows, extra = list[Tensor](), list[RawBatch]()
        first, end = 0, sum(len(source.drawn(number)) for source in self.sources)
        for source in self.sources:
            drawn, wanted = source.drawn(number), source.drawn(number, shift=1)
            elsewhere = wanted[~torch.isin(wanted, drawn)].unique()
            last = first + len(drawn)
            position = torch.cat(
                (torch.arange(first, last), torch.arange(end, end + len(elsewhere)))
            )
            ascending, order = torch.cat((drawn, elsewhere)).sort()
            rows.append(position[order[torch.searchsorted(ascending, wanted)]])
            if len(elsewhere):
                extra.append(source.read_samples(number, elsewhere))
            first, end = last, end + len(elsewhere)
        return Partners(
            torch.cat(rows).to(device), RawBatch.cat(extra).to(device) if extra else None
        )

    def close(self) -> None:
        """Stop the loader processes, if any."""
        for loader in self._loader:
            loader.close()


def _read_batch(sources: Sequence[BatchSource], number: int) -> RawBatch:
    batches = [source.read(number) for source in sources]
    assert len({batch.x.dtype for batch in batches}) == 1  # uint8 next to floats would be cast
    return RawBatch.cat(batches)
