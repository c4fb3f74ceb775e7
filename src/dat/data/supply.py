"""What a worker draws from: its part of one or of several sets of images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dat.data.images import ImageData
from dat.data.loader import Loader
from dat.data.local import Parts
from dat.data.parts import Plan, Split, default_parts
from dat.data.stored import Stored, at_random, read
from dat.rng import Draws, derive


class Drawn(NamedTuple):
    """A worker's share of a global batch."""

    x: Tensor
    """As they are stored: bytes, or floats in [0, 1]."""
    y: Tensor
    numbers: Tensor
    """The samples' numbers; those of a second set follow those of the first."""
    weight: Tensor
    """How much each counts."""

    @classmethod
    def joined(cls, several: Sequence[Drawn]) -> Drawn:
        """One after the other."""
        return several[0] if len(several) == 1 else cls(*map(torch.cat, zip(*several, strict=True)))

    def to(self, device: torch.device) -> Drawn:
        return Drawn(*(it.to(device, non_blocking=True) for it in self))


@dataclass(frozen=True)
class Source:
    """This worker's part of a set of images, and when it draws which of them."""

    data: ImageData
    """With the images' numbers in the whole set."""
    plan: Plan
    place: int
    """Which of the plan's workers this is."""
    weight: float = 1.0
    offset: int = 0
    """The number of the set's first image among those of all sets."""
    crops: int | None = None
    """Pictures are cut out at random, by this key; none: the middle."""

    @classmethod
    def of(cls, data: ImageData | Parts, plan: Plan, place: int) -> Source:
        """The part at `place` of the plan's workers."""
        if isinstance(data, Parts):
            return cls(data.collect(plan, place), plan, place)
        owned = plan.owned(place)
        return cls(replace(data.take(owned), numbers=owned), plan, place)

    def read(self, turn: int) -> Drawn:
        """The share of the batch of that number; after all images have been drawn it goes round
        again, in another order."""
        index = self.plan.draw(*divmod(turn, self.plan.steps), self.place)
        assert self.data.numbers is not None
        rows = torch.searchsorted(self.data.numbers, index)
        images, weight = self.data.images, self.plan.weights(index)
        if self.crops is None:
            x = read(images, rows)
        else:
            x = at_random(images, rows, Draws(derive(self.crops, "crop", turn), index))
        scale = torch.full((len(index),), self.weight)
        weight = scale if weight is None else scale * weight
        return Drawn(x, self.data.labels[rows], index + self.offset, weight)


@dataclass(frozen=True)
class Supply:
    """One or several sources; a batch has a share of each."""

    sources: Sequence[Source]
    steps: int
    """Batches in an epoch."""
    loaders: int = 0
    """Processes that decode pictures; 0: this one does."""
    _loader: list[Loader[Drawn]] = field(default_factory=list)

    @property
    def weight(self) -> float:
        """What all images of a batch, of all workers, count together."""
        return sum(source.plan.batch * source.weight for source in self.sources)

    def draw(self, epoch: int, step: int, device: torch.device) -> Drawn:
        """The worker's share of a global batch."""
        return self.several(epoch, range(step, step + 1), device)[0]

    def several(self, epoch: int, steps: range, device: torch.device) -> list[Drawn]:
        """The worker's shares of batches that follow each other."""
        if not self._loader:
            stored = [it.data.images for it in self.sources]
            slow = any(isinstance(images, Stored) and images.slow for images in stored)
            read = partial(_read, tuple(self.sources))
            self._loader.append(Loader(read, self.loaders if slow else 0))
        first = epoch * self.steps
        turns = range(first + steps.start, first + steps.stop)
        return [drawn.to(device) for drawn in self._loader[0].several(turns)]

    def close(self) -> None:
        """Let go of the processes, if there are any."""
        for loader in self._loader:
            loader.close()


def _read(sources: Sequence[Source], turn: int) -> Drawn:
    drawn = [it.read(turn) for it in sources]
    assert len({it.x.dtype for it in drawn}) == 1  # bytes beside floats would pass for floats
    return Drawn.joined(drawn)


@dataclass(frozen=True)
class Mix:
    """How unlabelled images go into a batch."""

    share: float = 0.5
    """Their share of a batch."""
    weight: float = 1.0
    """How much one counts beside a labelled image."""
    epoch_by: str = "labelled"
    """Whose number makes an epoch: `labelled`, `unlabelled`, or `both`."""


@dataclass(frozen=True)
class Dealing:
    """How sets are dealt out to the workers."""

    batch: int
    """The global batch."""
    workers: int
    place: int
    """Which of them this is."""
    seed: int
    parts: int | None = None
    loaders: int = 0
    random_crops: bool = False

    def source(self, data: ImageData | Parts, count: int, parts: int | None, seed: int) -> Source:
        """This worker's part of a set that gives `count` images to a batch."""
        if isinstance(data, Parts):
            if parts not in (None, len(data.sizes)):
                raise ValueError(
                    f"data.parts = {parts}: the data lies in {len(data.sizes)} parts; leave it out"
                )
            plan: Plan = data.plan(count, workers=self.workers, seed=seed)
        else:
            plan = Split(len(data), count, parts=parts, workers=self.workers, seed=seed)
        source = Source.of(data, plan, self.place)
        if not self.random_crops:
            return source
        if not isinstance(source.data.images, Stored) or not source.data.images.slow:
            raise ValueError(
                "data.augmentation = resized-crop: needs pictures in files, not images of one size "
                "in arrays; use crop-flip"
            )
        return replace(source, crops=seed)


def supply(
    labelled: ImageData | Parts, unlabelled: ImageData | None, mix: Mix, dealing: Dealing
) -> Supply:
    """What one of the workers draws from."""
    batch, parts, seed = dealing.batch, dealing.parts, dealing.seed
    if unlabelled is None:
        only = dealing.source(labelled, batch, parts, seed)
        return Supply([only], only.plan.steps, dealing.loaders)
    few = round(mix.share * batch)
    if not 0 < few < batch:
        raise ValueError(
            f"data.unlabelled_share = {mix.share:g}: leaves a batch of {batch} with {batch - few} "
            f"labelled and {few} unlabelled images; both need at least one"
        )
    if parts is None:
        parts = min(default_parts(dealing.workers, count) for count in (batch - few, few))
    fixed = isinstance(labelled, Parts)
    first = dealing.source(labelled, batch - few, None if fixed else parts, seed)
    second = dealing.source(unlabelled, few, parts, derive(seed, "unlabelled"))
    steps = {
        "labelled": first.plan.steps,
        "unlabelled": second.plan.steps,
        "both": (len(labelled) + len(unlabelled)) // batch,
    }[mix.epoch_by]
    second = replace(second, weight=mix.weight, offset=len(labelled))
    return Supply([first, second], steps, dealing.loaders)
