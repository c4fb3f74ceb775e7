"""Data that stays on its node: the parts D(1), ..., D(P) are given, and need not be alike.

Every step takes B / P images of each part, whatever its size, so that the parts count alike as in
equation 2 of the paper, (1 / M) sum_i f_i with f_i the mean over D(i), and no worker waits for
another. A part is gone round at its own pace, without a break between epochs: every image once in
some order, then every image once in another. An epoch has as many steps as B goes into the images
of all parts; in it the smallest part may be gone round several times and the largest not once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dat.data.images import ImageData
from dat.data.parts import Numbers, Plan, shares, split_holdout
from dat.rng import derive, generator

WEIGH_BY = ("parts", "images")


class Rounds(Plan):
    """Parts of any sizes, each gone round and round; numbers run through the parts in order."""

    def __init__(
        self, sizes: Sequence[int], batch: int, *, workers: int, seed: int, weigh_by: str = "parts"
    ) -> None:
        super().__init__(sizes, batch, workers=workers, seed=seed)
        self.ends = torch.tensor(self.sizes).cumsum(0)
        self.weigh_by = weigh_by
        self._orders: dict[tuple[int, int], Numbers] = {}

    def owned(self, rank: int) -> Tensor:
        numbers = [self._numbers(part) for part, _, _ in self.shares(rank)]
        return torch.cat(numbers)

    def given(self, epoch: int, step: int, part: int) -> Numbers:
        turn, size = epoch * self.steps + step, self.sizes[part]
        at, last = (self._drawn(t, part) for t in (turn, turn + 1))
        pieces = []
        while at < last:
            number, place = divmod(at, size)
            until = min(last - at, size - place)
            pieces.append(self._order(part, number)[place : place + until])
            at += until
        return np.concatenate(pieces)

    def weights(self, index: Tensor) -> Tensor | None:
        """By parts all count alike, since every part gives as many; by images a part counts for as
        much as it holds."""
        if self.weigh_by == "parts":
            return None
        shares = torch.tensor(self.sizes) * len(self.sizes) / self.samples
        return shares[torch.searchsorted(self.ends, index, right=True)]

    def _numbers(self, part: int) -> Tensor:
        end = int(self.ends[part])
        return torch.arange(end - self.sizes[part], end)

    def _order(self, part: int, number: int) -> Numbers:
        """A part's order in a round; the one before is kept no longer."""
        if (part, number) not in self._orders:
            self._orders.pop((part, number - 1), None)
            shuffle = generator(self.seed, "round", part, number)
            order = torch.randperm(self.sizes[part], generator=shuffle)
            self._orders[part, number] = self._numbers(part)[order].numpy()
        return self._orders[part, number]


@dataclass(frozen=True)
class Parts:
    """Sets of images, each to be opened only by the workers that draw from it."""

    sizes: tuple[int, ...]
    open: Callable[[int], ImageData]
    classes: int
    shape: tuple[int, int, int]
    names: tuple[str, ...] = ()
    weigh_by: str = "parts"
    dtype: torch.dtype = torch.uint8
    """Of the images: bytes or floats."""
    totals: tuple[int, ...] = ()
    """Images of each class in all parts, if that is known."""

    def __post_init__(self) -> None:
        if self.weigh_by not in WEIGH_BY:
            raise ValueError(f"weigh_by = {self.weigh_by!r}: must be one of {', '.join(WEIGH_BY)}")

    @classmethod
    def of(cls, sets: Sequence[ImageData], *, weigh_by: str = "parts") -> Parts:
        """Sets that are there already, all with the same classes."""
        first = sets[0]
        if any((it.classes, it.shape) != (first.classes, first.shape) for it in sets):
            raise ValueError("parts must agree in their classes and in the shape of their images")
        sizes = tuple(map(len, sets))
        if any(it.images.dtype != first.images.dtype for it in sets):
            raise ValueError("parts must agree in the type of their images, bytes or floats")
        return cls(
            *(sizes, sets.__getitem__, first.classes, first.shape, first.names, weigh_by),
            dtype=first.images.dtype,
        )

    def __len__(self) -> int:
        return sum(self.sizes)

    @property
    def channels(self) -> int:
        return self.shape[0]

    def split_holdout(self, share: float, seed: int) -> tuple[Parts, Parts | None]:
        """Hold back a share of every part, where it is."""
        counts = [round(share * size) for size in self.sizes]
        if not any(counts):
            return self, None
        if 0 in counts:
            raise ValueError(
                f"data.holdout = {share:g}: a part of {min(self.sizes)} images has none to hold out"
            )

        def halves(part: int) -> tuple[ImageData, ImageData | None]:
            return split_holdout(self.open(part), share, derive(seed, "part", part))

        def held(part: int) -> ImageData:
            held_out = halves(part)[1]
            assert held_out is not None
            return held_out

        sizes = tuple(size - count for size, count in zip(self.sizes, counts, strict=True))
        train = replace(self, sizes=sizes, open=lambda part: halves(part)[0])
        return train, replace(self, sizes=tuple(counts), open=held)

    def plan(self, batch: int, *, workers: int, seed: int) -> Rounds:
        return Rounds(self.sizes, batch, workers=workers, seed=seed, weigh_by=self.weigh_by)

    def collect(self, plan: Plan, place: int) -> ImageData:
        """The parts that a worker draws from, opened, with their numbers among all images."""
        return ImageData.join([self._numbered(part) for part, _, _ in plan.shares(place)])

    def share(self, workers: int, place: int) -> ImageData:
        """What is a worker's own where images are counted and not drawn: its parts, and of a part
        that several share a range."""
        mine = []
        for part, *edges in shares(len(self.sizes), workers, place):
            data = self._numbered(part)
            low, high = (edge * len(data) // workers for edge in edges)
            mine.append(data.take(torch.arange(low, high)))
        return ImageData.join(mine)

    def _numbered(self, part: int) -> ImageData:
        data, first = self.open(part), sum(self.sizes[:part])
        return replace(data, numbers=torch.arange(first, first + len(data)))
