"""Streams of images: iterable-style datasets, which cannot be indexed.

A stream guarantees less than a dataset. Which worker gets which images depends on the number of
workers; a resumed run reads the images of the finished steps again and drops them; and it sees the
same images only if the stream returns them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dat.data.batches import BatchSource, RawBatch
from dat.data.images import ImageData, check_range
from dat.data.partitions import Indices, PartitionSampler
from dat.data.torch_datasets import image_of, label_of

PROBED = 8
"""Images that are read in advance, to choose how to compute."""
Pairs = Iterable[tuple[Any, Any]]


@dataclass(frozen=True)
class Stream:
    """A stream of (image, label) pairs to train on: an iterable, such as torch's `IterableDataset`
    or a WebDataset pipeline.

    From an iterable, worker i of M takes every M-th pair, and drops the others. To have each worker
    read its own files, give a function instead, which gets (i, M) and returns an iterable.
    """

    pairs: Pairs | Callable[[int, int], Pairs]
    images: int
    """Images in an epoch; when the stream ends, it starts again."""
    classes: int

    def __post_init__(self) -> None:
        if self.images < 1 or self.classes < 1:
            raise ValueError(
                f"images = {self.images}, classes = {self.classes}: must be at least 1"
            )

    def __len__(self) -> int:
        return self.images

    def share(self, rank: int, workers: int) -> Iterator[tuple[Any, Any]]:
        """An endless iterator over one worker's pairs."""
        while True:
            empty = True
            for pair in self._once(rank, workers):
                empty = False
                yield pair
            if empty:
                raise ValueError("the stream is empty")

    def _once(self, rank: int, workers: int) -> Iterable[tuple[Any, Any]]:
        if callable(self.pairs) and not isinstance(self.pairs, Iterable):
            return self.pairs(rank, workers)
        return islice(self.pairs, rank, None, workers)


class StreamSampler(PartitionSampler):
    """A sample's number is its position in what all workers have read so far."""

    def __init__(self, images: int, batch: int, *, workers: int) -> None:
        super().__init__([images], batch, workers=workers, seed=0)

    def owned(self, rank: int) -> Tensor:
        """No worker owns images in advance."""
        return torch.empty(0, dtype=torch.int64)

    def partition_batch(self, epoch: int, step: int, partition: int) -> Indices:
        first = (epoch * self.steps + step) * self.batch
        return np.arange(first, first + self.batch)


@dataclass(frozen=True, kw_only=True)
class StreamSource(BatchSource):
    """A worker's share of a stream; `data` holds the first images."""

    stream: Stream
    _reader: dict[int, Iterator[tuple[Any, Any]]] = field(default_factory=dict, repr=False)
    """The rest of the share, by the number of the next batch."""

    @classmethod
    def of_stream(cls, stream: Stream, batch: int, *, workers: int, rank: int) -> StreamSource:
        """The share of the worker with that rank."""
        x, y = _pixels_and_labels(list(islice(stream.share(0, 1), PROBED)), 0, stream.classes)
        data = ImageData.of(x, y, classes=stream.classes)
        sampler = StreamSampler(len(stream), batch, workers=workers)
        return cls(data=data, sampler=sampler, rank=rank, stream=stream)

    def read(self, number: int) -> RawBatch:
        numbers = self.sampler.draw(*divmod(number, self.sampler.steps), self.rank)
        reader = self._reader.pop(number, None)
        if reader is None:  # the first batch, or one out of turn, as after a resume
            share = self.stream.share(self.rank, self.sampler.workers)
            reader = islice(share, self._read_before(number), None)
        pairs = list(islice(reader, len(numbers)))
        self._reader.clear()
        self._reader[number + 1] = reader
        x, y = _pixels_and_labels(pairs, int(numbers[0]), self.stream.classes)
        return RawBatch(x, y, numbers, torch.full((len(numbers),), self.weight))

    def _read_before(self, number: int) -> int:
        """Number of images this worker drew for the previous batches, which have equal sizes."""
        return number * len(self.sampler.draw(0, 0, self.rank))


def _pixels_and_labels(
    pairs: Sequence[tuple[Any, Any]], first: int, classes: int
) -> tuple[Tensor, Tensor]:
    x = torch.stack([image_of(pair, first + row) for row, pair in enumerate(pairs)])
    y = torch.tensor([label_of(pair, first + row) for row, pair in enumerate(pairs)])
    if x.is_floating_point():
        check_range(x, first)
    if not ((y >= 0) & (y < classes)).all():
        raise ValueError(f"labels from {y.min()} to {y.max()}: must be from 0 to {classes - 1}")
    return x, y
