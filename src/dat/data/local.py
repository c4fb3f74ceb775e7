"""Data that stays on its node: the partitions D(1), ..., D(P) are given, and may differ in size.

Every step takes B / P images of each partition, whatever its size, so partitions have equal weight
as in equation 2 of the paper, (1 / M) sum_i f_i with f_i the mean over D(i), and no worker waits
for another. Each partition is traversed at its own pace, across epochs: every image once in a
random order, then every image once in another order. An epoch has as many steps as B fits into the
images of all partitions; meanwhile the smallest partition may be traversed several times and the
largest not even once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dat.core.rng import derive, generator
from dat.core.short_repr import short_repr
from dat.data.images import ImageData
from dat.data.partitions import Indices, PartitionSampler, partition_ranges, split_holdout
from dat.data.reading import WEIGH_BY


class LocalPartitionSampler(PartitionSampler):
    """Partitions of any size, each traversed again and again; indices run through them in order."""

    def __init__(
        self, sizes: Sequence[int], batch: int, *, workers: int, seed: int, weigh_by: str = "parts"
    ) -> None:
        super().__init__(sizes, batch, workers=workers, seed=seed)
        self.ends = torch.tensor(self.sizes).cumsum(0)
        self.weigh_by = weigh_by
        self._orders: dict[tuple[int, int], Indices] = {}

    def owned(self, rank: int) -> Tensor:
        indices = [self._indices(partition) for partition, _, _ in self.ranges(rank)]
        return torch.cat(indices)

    def partition_batch(self, epoch: int, step: int, partition: int) -> Indices:
        step, size = epoch * self.steps + step, self.sizes[partition]
        position, last = (self._samples_drawn(t, partition) for t in (step, step + 1))
        pieces = []
        while position < last:
            traversal, start = divmod(position, size)
            count = min(last - position, size - start)
            pieces.append(self._order(partition, traversal)[start : start + count])
            position += count
        return np.concatenate(pieces)

    def weights(self, index: Tensor) -> Tensor | None:
        """With weigh_by = "parts" all weights are equal, as every partition contributes equally
        often; with "images" a partition's weight is its number of images."""
        if self.weigh_by == "parts":
            return None
        weights = torch.tensor(self.sizes) * len(self.sizes) / self.samples
        return weights[torch.searchsorted(self.ends, index, right=True)]

    def _indices(self, partition: int) -> Tensor:
        end = int(self.ends[partition])
        return torch.arange(end - self.sizes[partition], end)

    def _order(self, partition: int, traversal: int) -> Indices:
        """A partition's order in a traversal; the previous one is dropped."""
        if (partition, traversal) not in self._orders:
            self._orders.pop((partition, traversal - 1), None)
            shuffle = generator(self.seed, "round", partition, traversal)
            order = torch.randperm(self.sizes[partition], generator=shuffle)
            self._orders[partition, traversal] = self._indices(partition)[order].numpy()
        return self._orders[partition, traversal]


@dataclass(frozen=True)
class Partitions:
    """A training set in partitions, each opened only by the workers that draw from it."""

    sizes: tuple[int, ...]
    open: Callable[[int], ImageData]
    classes: int
    shape: tuple[int, int, int]
    names: tuple[str, ...] = ()
    weigh_by: str = "parts"
    dtype: torch.dtype = torch.uint8
    """Of the images: uint8 or floats."""
    totals: tuple[int, ...] = ()
    """Images per class in all partitions, if known."""

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.weigh_by not in WEIGH_BY:
            raise ValueError(f"weigh_by = {self.weigh_by!r}: must be one of {', '.join(WEIGH_BY)}")

    @classmethod
    def of(cls, datasets: Sequence[ImageData], *, weigh_by: str = "parts") -> Partitions:
        """Use datasets in memory as partitions; they must have the same classes."""
        first = datasets[0]
        if any((data.classes, data.shape) != (first.classes, first.shape) for data in datasets):
            raise ValueError("partitions must have the same classes and the same image shape")
        sizes = tuple(map(len, datasets))
        if any(data.images.dtype != first.images.dtype for data in datasets):
            raise ValueError("partitions must have the same dtype, uint8 or floats")
        return cls(
            *(sizes, datasets.__getitem__, first.classes, first.shape, first.names, weigh_by),
            dtype=first.images.dtype,
        )

    def __len__(self) -> int:
        return sum(self.sizes)

    @property
    def channels(self) -> int:
        return self.shape[0]

    def split_holdout(self, share: float, seed: int) -> tuple[Partitions, Partitions | None]:
        """Hold out a share of every partition, without moving it."""
        counts = [round(share * size) for size in self.sizes]
        if not any(counts):
            return self, None
        if 0 in counts:
            raise ValueError(
                f"data.holdout = {share:g}: a partition of {min(self.sizes)} images is too small "
                "to hold out any"
            )

        def open_split(partition: int) -> tuple[ImageData, ImageData | None]:
            return split_holdout(self.open(partition), share, derive(seed, "part", partition))

        def open_held_out(partition: int) -> ImageData:
            held_out = open_split(partition)[1]
            assert held_out is not None
            return held_out

        sizes = tuple(size - count for size, count in zip(self.sizes, counts, strict=True))
        train = replace(self, sizes=sizes, open=lambda partition: open_split(partition)[0])
        return train, replace(self, sizes=tuple(counts), open=open_held_out)

    def sampler(self, batch: int, *, workers: int, seed: int) -> LocalPartitionSampler:
        return LocalPartitionSampler(
            self.sizes, batch, workers=workers, seed=seed, weigh_by=self.weigh_by
        )

    def collect(self, sampler: PartitionSampler, rank: int) -> ImageData:
        """The partitions that a worker draws from, opened, with their global indices."""
        return ImageData.join(
            [self._numbered(partition) for partition, _, _ in sampler.ranges(rank)]
        )

    def share(self, workers: int, rank: int) -> ImageData:
        """A worker's images when each image is used exactly once: its partitions, or a range of a
        partition that several workers share."""
        pieces = []
        for partition, *edges in partition_ranges(len(self.sizes), workers, rank):
            data = self._numbered(partition)
            low, high = (edge * len(data) // workers for edge in edges)
            pieces.append(data.take(torch.arange(low, high)))
        return ImageData.join(pieces)

    def _numbered(self, partition: int) -> ImageData:
        data, first = self.open(partition), sum(self.sizes[:partition])
        return replace(data, numbers=torch.arange(first, first + len(data)))
