"""What a worker draws from: its part of one or of several sets of images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dat.data.images import ImageData
from dat.data.parts import Plan, default_parts
from dat.rng import derive


class Drawn(NamedTuple):
    """A worker's share of a global batch."""

    x: Tensor
    y: Tensor
    numbers: Tensor
    """The samples' numbers; those of a second set follow those of the first."""
    weight: Tensor
    """How much each counts."""


@dataclass(frozen=True)
class Source:
    """This worker's part of a set of images, and when it draws which of them."""

    data: ImageData
    owned: Tensor
    """The numbers of those images in the whole set, ascending."""
    plan: Plan
    weight: float = 1.0
    offset: int = 0
    """The number of the set's first image among those of all sets."""

    @classmethod
    def of(
        cls, data: ImageData, plan: Plan, place: int, *, weight: float = 1.0, offset: int = 0
    ) -> Source:
        """The part at `place` of the plan's workers."""
        owned = plan.owned(place)
        return cls(data.take(owned), owned, plan, weight, offset)

    def draw(self, turn: int, place: int, device: torch.device) -> Drawn:
        """The share of the batch of that number; after all images have been drawn it goes round
        again, in another order."""
        index = self.plan.draw(*divmod(turn, self.plan.steps), place)
        x, y = self.data.batch(torch.searchsorted(self.owned, index), device)
        weight = torch.full((len(index),), self.weight, device=device)
        return Drawn(x, y, (index + self.offset).to(device), weight)


@dataclass(frozen=True)
class Supply:
    """One or several sources; a batch has a share of each."""

    sources: Sequence[Source]
    steps: int
    """Batches in an epoch."""

    @property
    def weight(self) -> float:
        """What all images of a batch, of all workers, count together."""
        return sum(source.plan.batch * source.weight for source in self.sources)

    def draw(self, epoch: int, step: int, place: int, device: torch.device) -> Drawn:
        """A worker's share of a global batch."""
        drawn = [it.draw(epoch * self.steps + step, place, device) for it in self.sources]
        return drawn[0] if len(drawn) == 1 else Drawn(*map(torch.cat, zip(*drawn, strict=True)))


@dataclass(frozen=True)
class Mix:
    """How unlabelled images go into a batch."""

    share: float = 0.5
    """Their share of a batch."""
    weight: float = 1.0
    """How much one counts beside a labelled image."""
    epoch_by: str = "labelled"
    """Whose number makes an epoch: `labelled`, `unlabelled`, or `both`."""


def supply(
    labelled: ImageData,
    unlabelled: ImageData | None,
    mix: Mix,
    *,
    batch: int,
    parts: int | None,
    workers: int,
    place: int,
    seed: int,
) -> Supply:
    """What one of the workers draws from."""

    def plan(data: ImageData, count: int, parts: int | None, seed: int) -> Plan:
        return Plan(len(data), count, parts=parts, workers=workers, seed=seed)

    if unlabelled is None:
        only = plan(labelled, batch, parts, seed)
        return Supply([Source.of(labelled, only, place)], only.steps)
    few = round(mix.share * batch)
    if not 0 < few < batch:
        raise ValueError(
            f"data.unlabelled_share = {mix.share:g}: leaves a batch of {batch} with {batch - few} "
            f"labelled and {few} unlabelled images; both need at least one"
        )
    parts = parts or min(default_parts(workers, count) for count in (batch - few, few))
    first = plan(labelled, batch - few, parts, seed)
    second = plan(unlabelled, few, parts, derive(seed, "unlabelled"))
    steps = {
        "labelled": first.steps,
        "unlabelled": second.steps,
        "both": (len(labelled) + len(unlabelled)) // batch,
    }[mix.epoch_by]
    return Supply(
        [
            Source.of(labelled, first, place),
            Source.of(unlabelled, second, place, weight=mix.weight, offset=len(labelled)),
        ],
        steps,
    )
