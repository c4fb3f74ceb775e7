"""Which worker draws which samples: D is split into partitions D(1), ..., D(P).

The partitions fill the global batch of a step in order, B / P images each, and the workers take it
in order, B / M images each. So with P = M, worker i draws its batch from D(i) alone, as in step 4
of Algorithm A1; with P a multiple of M, it draws from P / M partitions of its own; with fewer
partitions than workers, several workers share one (the paper's p nodes with q devices each). The
global batch depends on P but never on M, so the result is independent of the number of workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dat.core.glossary import plural
from dat.core.rng import generator
from dat.data.batch_size import check_batch
from dat.data.images import ImageData

Indices = np.ndarray[Any, np.dtype[np.int64]]
"""Sample indices in numpy, which slices ten times as fast as torch."""
DEFAULT_PARTITIONS = 24
"""Divides evenly among 1, 2, 3, 4, 6, 8, 12 and 24 workers."""


def split_holdout(data: ImageData, share: float, seed: int) -> tuple[ImageData, ImageData | None]:
    """Split off a random share of the training set for model selection."""
    count = round(share * len(data))
    if count == 0:
        return data, None
    if count >= len(data):
        raise ValueError(f"data.holdout = {share:g}: leaves none of {len(data)} images to train on")
    order = torch.randperm(len(data), generator=generator(seed, "holdout"))
    return data.take(order[count:].sort().values), data.take(order[:count].sort().values)


def split_labels(data: ImageData, count: int, seed: int) -> tuple[ImageData, ImageData]:
    """A random class-balanced subset of `count` images, and the remaining ones."""
    if not 0 < count < len(data):
        raise ValueError(
            f"data.labels = {count}: must be above 0 and below {len(data)}, the number of images"
        )
    chosen = _balanced_rows(data, count, seed, "labels")
    remaining = torch.ones(len(data), dtype=torch.bool)
    remaining[chosen] = False
    return data.take(chosen), data.take(remaining.nonzero().squeeze(1))


def limit_images(data: ImageData, count: int | None, seed: int) -> ImageData:
    """A random class-balanced subset of `count` training images; None: all."""
    if count is None or count == len(data):
        return data
    if count > len(data):
        raise ValueError(f"data.limit = {count}: there are only {len(data)} training images")
    return data.take(_balanced_rows(data, count, seed, "limit"))


def _balanced_rows(data: ImageData, count: int, seed: int, purpose: str) -> Tensor:
    """The rows of a random class-balanced subset, ascending."""
    order = torch.randperm(len(data), generator=generator(seed, purpose))
    return interleave_classes(data, order)[:count].sort().values


def interleave_classes(data: ImageData, order: Tensor) -> Tensor:
    """Reorder: the first image of every class in `order`, then the second of every class, ..."""
    ranks = torch.empty(len(data), dtype=torch.int64)
    for label in range(data.classes):
        of_class = order[data.labels[order] == label]
        ranks[of_class] = torch.arange(len(of_class))
    return order[ranks[order].argsort(stable=True)]


def class_balanced_subset(data: ImageData, count: int | None) -> ImageData:
    """The first `count` images, class-balanced; None: all.

    Images in a folder are sorted by class, so taking the first rows would miss classes.
    """
    if count is None or count >= len(data):
        return data
    rows = interleave_classes(data, torch.arange(len(data)))[:count].sort().values
    return replace(data.take(rows), numbers=data.number(rows))  # same random streams as in `data`


def default_partitions(workers: int, batch: int) -> int:
    """24 partitions if the workers can share them evenly, otherwise one per worker."""
    enough = batch >= 2 * DEFAULT_PARTITIONS or batch % DEFAULT_PARTITIONS == 0
    return DEFAULT_PARTITIONS if DEFAULT_PARTITIONS % workers == 0 and enough else workers


def partition_ranges(partitions: int, workers: int, rank: int) -> Iterator[tuple[int, int, int]]:
    """The partitions of a worker as (partition, low, high): its share is low / M to high / M.

    With a partition M units long and a worker P units, both laid end to end, these are the
    overlaps.
    """
    start, end = rank * partitions, (rank + 1) * partitions
    for partition in range(partitions):
        left = partition * workers
        low, high = max(start - left, 0), min(end - left, workers)
        if low < high:
            yield partition, low, high


def _check_workers(workers: int, samples: int) -> None:
    if workers > samples:
        raise ValueError(f"{workers} workers for {samples} training images: use fewer workers")


class PartitionSampler(ABC):
    """Which samples make up global batch t, and which of them a worker draws.

    Laid end to end, each partition contributes B / P samples per step and each worker takes B / M.
    """

    def __init__(self, sizes: Sequence[int], batch: int, *, workers: int, seed: int) -> None:
        self.samples, self.batch, self.workers, self.seed = sum(sizes), batch, workers, seed
        self.sizes = tuple(sizes)
        _check_workers(workers, self.samples)
        if batch > self.samples:
            raise ValueError(
                f"train.batch = {batch}: there are only {self.samples} training images, "
                f"{self.samples // workers} for each of {plural(workers, 'worker')}"
            )
        check_batch(batch, workers, len(sizes))
        self.steps = self.samples // batch
        """Steps per epoch."""

    @abstractmethod
    def owned(self, rank: int) -> Tensor:
        """All samples that a worker ever draws, ascending."""

    @abstractmethod
    def partition_batch(self, epoch: int, step: int, partition: int) -> Indices:
        """The samples that a partition contributes to a global batch."""

    def draw(self, epoch: int, step: int, rank: int, *, shift: int = 0) -> Tensor:
        """The samples of one worker's share of a global batch. With `shift`, the samples that many
        places further on in the same partition's part of the batch, cyclically."""
        shares = []
        for partition, low, high in self.ranges(rank):
            samples = self.partition_batch(epoch, step, partition)
            count = len(samples)
            if shift:
                samples = np.roll(samples, -shift)
            shares.append(samples[low * count // self.workers : high * count // self.workers])
        return torch.from_numpy(np.concatenate(shares))

    def weights(self, index: Tensor) -> Tensor | None:
        """The weight of each of these samples; None: all equal."""
        return None

    def ranges(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """The partitions that a worker draws from, as in `partition_ranges`."""
        return partition_ranges(len(self.sizes), self.workers, rank)

    def _samples_drawn(self, steps: int, partition: int) -> int:
        """How many samples a partition has contributed after `steps` steps: B / P per step, rounded
        such that all partitions together have contributed exactly the batches."""
        total, partitions = steps * self.batch, len(self.sizes)
        return total * (partition + 1) // partitions - total * partition // partitions


class RandomPartitionSampler(PartitionSampler):
    """Splits a dataset that every worker can read into random partitions.

    The samples that do not fill a batch at the end of an epoch are dropped, others each epoch.
    """

    def __init__(
        self, samples: int, batch: int, *, workers: int, seed: int, parts: int | None = None
    ) -> None:
        _check_workers(workers, samples)
        parts = parts or default_partitions(workers, batch)
        if parts > samples:
            raise ValueError(f"data.parts = {parts}: there are only {samples} training images")
        sizes = [samples // parts] * parts
        super().__init__(
            [*sizes[:-1], samples - sum(sizes[:-1])], batch, workers=workers, seed=seed
        )
        # sizes differ by at most one; partitions that contribute more per epoch are larger
        drawn = [self._samples_drawn(self.steps, partition) for partition in range(parts)]
        larger = sorted(range(parts), key=lambda partition: -drawn[partition])[: samples % parts]
        self.sizes = tuple(samples // parts + (partition in larger) for partition in range(parts))
        order = torch.randperm(samples, generator=generator(seed, "partition"))
        self.partitions = [partition.sort().values for partition in order.split(list(self.sizes))]
        self._epoch, self._orders = -1, dict[int, Indices]()

    def owned(self, rank: int) -> Tensor:
        samples = [self.partitions[partition] for partition, _, _ in self.ranges(rank)]
        return torch.cat(samples).sort().values

    def partition_batch(self, epoch: int, step: int, partition: int) -> Indices:
        first, last = (self._samples_drawn(t, partition) for t in (step, step + 1))
        return self._order(epoch, partition)[first:last]

    def _order(self, epoch: int, partition: int) -> Indices:
        """A partition in the order of an epoch; the orders of the current epoch are cached."""
        if self._epoch != epoch:
            self._epoch, self._orders = epoch, {}
        if partition not in self._orders:
            samples = self.partitions[partition]
            shuffle = generator(self.seed, "shuffle", epoch, partition)
            order = samples[torch.randperm(len(samples), generator=shuffle)]
            self._orders[partition] = order.numpy()
        return self._orders[partition]
