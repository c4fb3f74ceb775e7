"""Who draws what: D is split into parts D(1), ..., D(P), and each worker draws from its own.

The global batch of a step is filled by the parts in order, B / P images each, and taken by the
workers in order, B / M images each. So with P = M worker i draws its batch from D(i) alone, as in
step 4 of Algorithm A1; with P a multiple of M it draws from P / M parts of its own; and with fewer
parts than workers several share one (the paper's p nodes with q devices each). The global batch
depends on P, never on M: that is what makes the result independent of the number of workers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dat.data.images import ImageData
from dat.rng import generator

Numbers = np.ndarray[Any, np.dtype[np.int64]]
"""Of samples: numpy takes a tenth of torch's time to slice."""
PARTS = 24
"""Divides evenly among 1, 2, 3, 4, 6, 8, 12 and 24 workers."""


def split_holdout(data: ImageData, share: float, seed: int) -> tuple[ImageData, ImageData | None]:
    """Hold back a share of the training set, to choose the best checkpoint by."""
    count = round(share * len(data))
    if count == 0:
        return data, None
    if count >= len(data):
        raise ValueError(f"data.holdout = {share:g}: leaves none of {len(data)} images to train on")
    order = torch.randperm(len(data), generator=generator(seed, "holdout"))
    return data.take(order[count:].sort().values), data.take(order[:count].sort().values)


def split_labels(data: ImageData, count: int, seed: int) -> tuple[ImageData, ImageData]:
    """So many images, as evenly over the classes as it goes, and the rest."""
    if not 0 < count < len(data):
        raise ValueError(
            f"data.labels = {count}: must be above 0 and below {len(data)}, all images"
        )
    order = torch.randperm(len(data), generator=generator(seed, "labels"))
    chosen = class_by_class(data, order)[:count]
    rest = torch.ones(len(data), dtype=torch.bool)
    rest[chosen] = False
    return data.take(chosen.sort().values), data.take(rest.nonzero().squeeze(1))


def class_by_class(data: ImageData, order: Tensor) -> Tensor:
    """The first of every class in this order, then the second, and so on."""
    ranks = torch.empty(len(data), dtype=torch.int64)
    for label in range(data.classes):
        own = order[data.labels[order] == label]
        ranks[own] = torch.arange(len(own))
    return order[ranks[order].argsort(stable=True)]


def some_images(data: ImageData, count: int | None) -> ImageData:
    """So many, as evenly over the classes as it goes, the first of each: a folder's images are
    sorted by class, and others follow each other in turn."""
    if count is None or count >= len(data):
        return data
    rows = class_by_class(data, torch.arange(len(data)))[:count].sort().values
    return replace(data.take(rows), numbers=data.number(rows))  # which fall as in the whole set


def default_parts(workers: int, batch: int) -> int:
    """PARTS where the workers can share them out evenly, else one part a worker."""
    enough = batch >= 2 * PARTS or batch % PARTS == 0
    return PARTS if PARTS % workers == 0 and enough else workers


def shares(parts: int, workers: int, rank: int) -> Iterator[tuple[int, int, int]]:
    """The parts that are a worker's, and of each from and to which M-th.

    On a scale where a part is M long and a worker P, both laid end to end, they overlap so.
    """
    start, end = rank * parts, (rank + 1) * parts
    for part in range(parts):
        left = part * workers
        low, high = max(start - left, 0), min(end - left, workers)
        if low < high:
            yield part, low, high


def check_workers(workers: int, samples: int) -> None:
    if workers > samples:
        raise ValueError(f"{workers} workers for {samples} training images: use fewer workers")


class Plan(ABC):
    """Which samples make up global batch t, and which of them a worker draws.

    The parts give B / P samples a step each, laid end to end; so do the workers, B / M each.
    """

    def __init__(self, sizes: Sequence[int], batch: int, *, workers: int, seed: int) -> None:
        self.samples, self.batch, self.workers, self.seed = sum(sizes), batch, workers, seed
        self.sizes = tuple(sizes)
        check_workers(workers, self.samples)
        if batch > self.samples:
            raise ValueError(
                f"train.batch = {batch}: there are only {self.samples} training images, "
                f"{self.samples // workers} for each of {workers} worker{'s' * (workers != 1)}"
            )
        least = max(workers, len(sizes))
        if batch < 2 * least and batch % math.lcm(workers, len(sizes)):
            raise ValueError(
                f"train.batch = {batch}: too small for {workers} worker"
                f"{'s' * (workers != 1)} and {len(sizes)} part{'s' * (len(sizes) != 1)}; "
                f"use {2 * least} or more"
            )
        self.steps = self.samples // batch
        """Steps per epoch."""

    @abstractmethod
    def owned(self, rank: int) -> Tensor:
        """The samples that a worker ever draws, ascending: it needs no others."""

    @abstractmethod
    def given(self, epoch: int, step: int, part: int) -> Numbers:
        """What a part gives to a global batch."""

    def draw(self, epoch: int, step: int, rank: int) -> Tensor:
        """The samples of one worker's share of a global batch."""
        share = []
        for part, low, high in self.shares(rank):
            given = self.given(epoch, step, part)
            count = len(given)
            share.append(given[low * count // self.workers : high * count // self.workers])
        return torch.from_numpy(np.concatenate(share))

    def weights(self, index: Tensor) -> Tensor | None:
        """How much each of these samples counts; none: all alike."""
        return None

    def shares(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """The parts that a worker draws from; of each, from and to which M-th of what it gives."""
        return shares(len(self.sizes), self.workers, rank)

    def _drawn(self, steps: int, part: int) -> int:
        """How many samples a part has given after some steps: B / P a step, rounded so that all
        parts together have given exactly the batches."""
        given, parts = steps * self.batch, len(self.sizes)
        return given * (part + 1) // parts - given * part // parts


class Split(Plan):
    """A set of which every worker could see all, split into parts at random.

    What is left over at an epoch's end is left out, another rest each epoch.
    """

    def __init__(
        self, samples: int, batch: int, *, workers: int, seed: int, parts: int | None = None
    ) -> None:
        check_workers(workers, samples)
        parts = parts or default_parts(workers, batch)
        if parts > samples:
            raise ValueError(f"data.parts = {parts}: there are only {samples} training images")
        sizes = [samples // parts] * parts
        super().__init__(
            [*sizes[:-1], samples - sum(sizes[:-1])], batch, workers=workers, seed=seed
        )
        # sizes differ by at most one, the larger where most is drawn
        drawn = [self._drawn(self.steps, part) for part in range(parts)]
        larger = sorted(range(parts), key=lambda part: -drawn[part])[: samples % parts]
        self.sizes = tuple(samples // parts + (part in larger) for part in range(parts))
        order = torch.randperm(samples, generator=generator(seed, "partition"))
        self.parts = [part.sort().values for part in order.split(list(self.sizes))]
        self._epoch, self._orders = -1, dict[int, Numbers]()

    def owned(self, rank: int) -> Tensor:
        touched = [self.parts[part] for part, _, _ in self.shares(rank)]
        return torch.cat(touched).sort().values

    def given(self, epoch: int, step: int, part: int) -> Numbers:
        first, last = (self._drawn(t, part) for t in (step, step + 1))
        return self._order(epoch, part)[first:last]

    def _order(self, epoch: int, part: int) -> Numbers:
        """A part in the order of an epoch; those of the current epoch are kept."""
        if self._epoch != epoch:
            self._epoch, self._orders = epoch, {}
        if part not in self._orders:
            samples = self.parts[part]
            shuffle = generator(self.seed, "shuffle", epoch, part)
            order = samples[torch.randperm(len(samples), generator=shuffle)]
            self._orders[part] = order.numpy()
        return self._orders[part]
