"""APGD (Croce & Hein 2020): projected ascent with momentum whose step size sets itself."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from dat.attacks.base import Attack, Targeted
from dat.attacks.victim import (
    GIVEN,
    LOSSES,
    Loss,
    Victim,
    View,
    ascended,
    look,
    narrowed,
    settled,
)
from dat.fields import setting
from dat.losses import targeted_dlr
from dat.rng import Draws
from dat.threat import ThreatModel, per_sample

MOMENTUM = 0.75
ENOUGH = 0.75
"""The share of steps that must have raised the loss, or the step size is halved."""


@dataclass
class Climb:
    """How far the samples have come."""

    x: Tensor
    at: Tensor
    before: Tensor
    seen: View
    best: Tensor
    best_seen: View
    step: Tensor
    rises: Tensor
    """Steps since the last checkpoint that raised the loss."""
    best_then: Tensor
    """The best loss at the last checkpoint."""
    halved: Tensor
    """Whether the step size was halved there."""

    @classmethod
    def begin(cls, x: Tensor, at: Tensor, seen: View, step: float) -> Climb:
        return cls(
            x=x,
            at=at,
            before=at,
            seen=seen,
            best=at,
            best_seen=seen,
            step=torch.full_like(seen.loss, step),
            rises=torch.zeros_like(seen.loss),
            best_then=seen.loss,
            halved=torch.ones_like(seen.broken),
        )

    def pick(self, rows: Tensor) -> Climb:
        values: list[Any] = [_pick(getattr(self, field.name), rows) for field in fields(self)]
        return Climb(*values)

    def arrive(self, at: Tensor, seen: View) -> None:
        """Take a step, and keep the best."""
        self.rises += seen.loss > self.seen.loss
        self.before, self.at, self.seen = self.at, at, seen
        better = seen.loss > self.best_seen.loss
        self.best = _where(better, at, self.best)
        self.best_seen = _choose(better, seen, self.best_seen)

    def reconsider(self, steps: int) -> None:
        """At a checkpoint: where few of the last steps raised the loss, or none raised the best
        one at the same step size, halve it and go on from the best point."""
        stuck = ~self.halved & (self.best_then >= self.best_seen.loss)
        halve = (self.rises <= ENOUGH * steps) | stuck
        self.step = torch.where(halve, self.step / 2, self.step)
        self.at = _where(halve, self.best, self.at)
        gradient = _where(halve, self.best_seen.gradient, self.seen.gradient)
        self.seen = self.seen._replace(gradient=gradient)
        self.rises = torch.zeros_like(self.rises)
        self.best_then, self.halved = self.best_seen.loss, halve


@dataclass(frozen=True, kw_only=True)
class APGD(Attack):
    """`steps` ascent steps from a random point of the ball's surface, the first ones long."""

    steps: int = setting(100, "ascent steps", ge=1)
    loss: str = setting(
        GIVEN, "what to ascend; given is the objective's own", choices=(GIVEN, *LOSSES)
    )
    eot: int = setting(1, "gradients averaged at each step, for random networks", ge=1)

    def perturb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Draws) -> Tensor:
        return self.climb(ascended(loss, self.loss, "apgd.loss"), x, threat, draws)

    def climb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Draws) -> Tensor:
        """The best points; of a victim that need only be broken, the first that break it."""
        found = x.clone()
        rows = torch.arange(len(x), device=x.device)
        at = threat.random_edge(x, draws)
        climb = Climb.begin(x, at, look(loss, at, draws=self.eot), 2 * threat.eps)
        checkpoints, since = self.checkpoints(), 0
        for step in range(self.steps):
            rows, climb, loss = _spare(found, rows, climb, loss)
            if len(rows) == 0:
                return found
            at = self._step(climb, threat, first=step == 0)
            climb.arrive(at, look(loss, at, draws=self.eot))
            since += 1
            if step in checkpoints:
                rows, climb, loss = _spare(found, rows, climb, loss)
                climb.reconsider(since)
                since = 0
        rows, climb, _ = _spare(found, rows, climb, loss)
        found[rows] = climb.best
        return found

    def _step(self, climb: Climb, threat: ThreatModel, *, first: bool) -> Tensor:
        share = 1.0 if first else MOMENTUM
        there = threat.ascend(climb.at, climb.seen.gradient, climb.step, climb.x)
        drift = climb.at - climb.before
        return threat.project(climb.at + share * (there - climb.at) + (1 - share) * drift, climb.x)

    def checkpoints(self) -> set[int]:
        """After 22 % of the steps, then after ever fewer, down to 6 %."""
        length, places, place = max(int(0.22 * self.steps), 1), set[int](), -1
        while (place := place + length) < self.steps:
            places.add(place)
            length = max(length - max(int(0.03 * self.steps), 1), max(int(0.06 * self.steps), 1))
        return places

    @property
    def reads_labels(self) -> bool:
        return self.loss != GIVEN

    def cost(self) -> int:
        return 3 * self.eot * (self.steps + 1)


@dataclass(frozen=True, kw_only=True)
class TargetedAPGD(Targeted):
    """APGD on the targeted DLR loss, aimed at the likeliest wrong classes in turn."""

    steps: int = setting(100, "ascent steps for each target", ge=1)
    eot: int = setting(1, "gradients averaged at each step, for random networks", ge=1)

    def aimed(self, loss: Victim, x: Tensor, threat: ThreatModel, draws: Draws) -> Tensor:
        climber = APGD(steps=self.steps, eot=self.eot)
        return climber.climb(replace(loss, loss=targeted_dlr), x, threat, draws)

    def cost(self) -> int:
        return self.targets * APGD(steps=self.steps, eot=self.eot).cost()


def _spare(found: Tensor, rows: Tensor, climb: Climb, loss: Loss) -> tuple[Tensor, Climb, Loss]:
    """Whoever is broken, and need be no more than that, is done: the example is kept."""
    broken = climb.seen.broken
    if not settled(loss) or not broken.any():
        return rows, climb, loss
    found[rows[broken]] = climb.at[broken]
    standing = (~broken).nonzero().squeeze(1)
    return rows[standing], climb.pick(standing), narrowed(loss, standing)


def _where(rows: Tensor, these: Tensor, those: Tensor) -> Tensor:
    return torch.where(per_sample(rows, these), these, those)


def _choose(rows: Tensor, these: View, those: View) -> View:
    return View(*(_where(rows, a, b) for a, b in zip(these, those, strict=True)))


def _pick(value: Tensor | View, rows: Tensor) -> Tensor | View:
    return View(*(part[rows] for part in value)) if isinstance(value, View) else value[rows]
