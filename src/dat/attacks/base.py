"""What every attack is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dat.attacks.victim import Loss, Victim, glance, narrowed, settled, victim
from dat.fields import Settings, setting
from dat.rng import Draws
from dat.threat import ThreatModel, per_sample

Attempt = Callable[[Tensor], Tensor]
"""One of several attacks on the same images: the rows to attack, to adversarial examples."""


@dataclass(frozen=True, kw_only=True)
class Attack(Settings, ABC):
    """An approximate solution of max over the threat model of a loss, for each sample alone."""

    def __call__(
        self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Draws | None = None
    ) -> Tensor:
        """Adversarial examples: in the ball around `x`, in [0, 1], and not requiring gradients.

        Without `draws` the samples are numbered 0, 1, ... and the seed is 0.
        """
        if draws is None:
            draws = Draws.of(0, "attack", index=torch.arange(len(x), device=x.device))
        return self.perturb(loss, x.detach(), threat, draws)

    @abstractmethod
    def perturb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Draws) -> Tensor: ...

    def rounds(self) -> Sequence[Attack]:
        """Attacks that, one after the other, do what this one does; between them, whoever is broken
        may be left out."""
        return (self,)

    @property
    def reach(self) -> float:
        """How far the examples may be from the image, in units of eps."""
        return 1.0

    @property
    def reads_labels(self) -> bool:
        """Whether it must know the right answers, whatever the objective ascends."""
        return False

    def cost(self) -> int:
        """Forward passes for a sample that withstands it, a backward pass counted as two."""
        return 0


@dataclass(frozen=True, kw_only=True)
class Targeted(Attack):
    """Aims at the likeliest wrong classes in turn."""

    targets: int = setting(9, "how many wrong classes, the likeliest first", ge=1)
    first: int = setting(1, "the first of them, counted from 1", ge=1)

    @property
    def reads_labels(self) -> bool:
        return True

    @abstractmethod
    def aimed(self, loss: Victim, x: Tensor, threat: ThreatModel, draws: Draws) -> Tensor:
        """Attack with `loss.targets` in view."""

    def perturb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Draws) -> Tensor:
        against = victim(loss, type(self).__name__)
        order = against.wrong_classes(x)
        ranks = range(self.first, min(self.first + self.targets, order.shape[1] + 1))

        def attempt(rank: int) -> Attempt:
            return lambda rows: self.aimed(
                replace(against.pick(rows), targets=order[rows, rank - 1]),
                x[rows],
                threat,
                draws.pick(rows).fork("target", rank),
            )

        return worst_of(against, x, [attempt(rank) for rank in ranks])

    def rounds(self) -> Sequence[Self]:
        ranks = range(self.first, self.first + self.targets)
        return [replace(self, first=rank, targets=1) for rank in ranks]


def worst_of(loss: Loss, x: Tensor, attempts: Sequence[Attempt]) -> Tensor:
    """What several attempts come to, each sample at its worst: broken, or else the highest loss.

    A victim that need only be broken is spared the further attempts once it is.
    """
    rows = torch.arange(len(x), device=x.device)
    if not attempts:
        return x
    worst = attempts[0](rows)
    if len(attempts) == 1:
        return worst
    highest, broken = glance(loss, worst)
    for attempt in attempts[1:]:
        if settled(loss):
            rows = (~broken).nonzero().squeeze(1)
        if len(rows) == 0:
            break
        other = attempt(rows)
        reached, broke = glance(narrowed(loss, rows), other)
        better = (broke & ~broken[rows]) | ((broke == broken[rows]) & (reached > highest[rows]))
        worst[rows] = torch.where(per_sample(better, other), other, worst[rows])
        highest[rows] = torch.where(better, reached, highest[rows])
        broken[rows] |= broke
    return worst
