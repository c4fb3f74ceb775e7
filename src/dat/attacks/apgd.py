"""APGD (Croce & Hein 2020): projected gradient ascent with momentum and an adaptive step size."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from dat.attacks.base import Attack, Targeted
from dat.attacks.target import (
    GIVEN,
    LOSSES,
    AttackTarget,
    Loss,
    ValueAndGrad,
    select,
    stops_when_broken,
    value_and_grad,
    with_loss,
)
from dat.core.lazy import torch
from dat.core.losses import targeted_dlr
from dat.core.rng import Streams
from dat.core.settings import setting
from dat.core.threat import ThreatModel, per_sample

if TYPE_CHECKING:
    from torch import Tensor

MOMENTUM = 0.75
"""alpha: the weight of the gradient step; the rest repeats the previous update."""
RHO = 0.75
"""The step size is halved unless more than this share of the steps raised the loss."""


@dataclass
class APGDState:
    """The progress of the attack; all tensors have one row per sample."""

    x: Tensor
    x_adv: Tensor
    previous: Tensor
    """x_adv one step ago."""
    current: ValueAndGrad
    """The loss at x_adv."""
    best: Tensor
    """The point with the highest loss so far."""
    best_value: ValueAndGrad
    """The loss there."""
    step_size: Tensor
    increases: Tensor
    """Steps since the last checkpoint that raised the loss."""
    checkpoint_loss: Tensor
    """The highest loss at the last checkpoint."""
    halved: Tensor
    """Whether the step size was halved at the last checkpoint."""

    @classmethod
    def start(cls, x: Tensor, x_adv: Tensor, value: ValueAndGrad, step_size: float) -> APGDState:
        return cls(
            x=x,
            x_adv=x_adv,
            previous=x_adv,
            current=value,
            best=x_adv,
            best_value=value,
            step_size=torch.full_like(value.loss, step_size),
            increases=torch.zeros_like(value.loss),
            checkpoint_loss=value.loss,
            halved=torch.ones_like(value.misclassified),
        )

    def select(self, rows: Tensor) -> APGDState:
        """The state of a subset of the samples."""
        values: list[Any] = [_select(getattr(self, field.name), rows) for field in fields(self)]
        return APGDState(*values)

    def update(self, x_adv: Tensor, value: ValueAndGrad) -> None:
        """Move to a new point, and keep the best one."""
        self.increases += value.loss > self.current.loss
        self.previous, self.x_adv, self.current = self.x_adv, x_adv, value
        better = value.loss > self.best_value.loss
        self.best = _where(better, x_adv, self.best)
        self.best_value = ValueAndGrad(
            *(_where(better, new, old) for new, old in zip(value, self.best_value, strict=True))
        )

    def adapt_step_size(self, steps: int) -> None:
        """At a checkpoint, halve the step size and return to the best point where too few of the
        last `steps` steps raised the loss (condition 1 of the paper), or neither the step size nor
        the highest loss has changed since the last checkpoint (condition 2)."""
        stuck = ~self.halved & (self.checkpoint_loss >= self.best_value.loss)
        halve = (self.increases <= RHO * steps) | stuck
        self.step_size = torch.where(halve, self.step_size / 2, self.step_size)
        self.x_adv = _where(halve, self.best, self.x_adv)
        gradient = _where(halve, self.best_value.gradient, self.current.gradient)
        self.current = self.current._replace(gradient=gradient)
        self.increases = torch.zeros_like(self.increases)
        self.checkpoint_loss, self.halved = self.best_value.loss, halve


@dataclass(frozen=True, kw_only=True)
class APGD(Attack):
    """`steps` ascent steps from a random point on the surface of the ball; the step size starts at
    2 eps and is halved as progress slows."""

    steps: int = setting(100, "ascent steps", ge=1)
    loss: str = setting(
        GIVEN, "loss to maximize; given: that of the objective", choices=(GIVEN, *LOSSES)
    )
    eot: int = setting(1, "gradients averaged per step, for randomized networks", ge=1)

    def perturb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Streams) -> Tensor:
        return self.maximize(with_loss(loss, self.loss, "apgd.loss"), x, threat, draws)

    def maximize(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Streams) -> Tensor:
        """The points of highest loss or, with `until_broken`, the first misclassified ones."""
        result = x.clone()
        rows = torch.arange(len(x), device=x.device)
        x_adv = threat.random_boundary_start(x, draws)
        value = value_and_grad(loss, x_adv, samples=self.eot)
        state = APGDState.start(x, x_adv, value, 2 * threat.eps)
        checkpoints, since_checkpoint = self.checkpoints(), 0
        for step in range(self.steps):
            rows, state, loss = _drop_broken(result, rows, state, loss)
            if len(rows) == 0:
                return result
            x_adv = self._step(state, threat, first=step == 0)
            state.update(x_adv, value_and_grad(loss, x_adv, samples=self.eot))
            since_checkpoint += 1
            if step in checkpoints:
                rows, state, loss = _drop_broken(result, rows, state, loss)
                state.adapt_step_size(since_checkpoint)
                since_checkpoint = 0
        rows, state, _ = _drop_broken(result, rows, state, loss)
        result[rows] = state.best
        return result

    def _step(self, state: APGDState, threat: ThreatModel, *, first: bool) -> Tensor:
        alpha = 1.0 if first else MOMENTUM
        stepped = threat.ascend(state.x_adv, state.current.gradient, state.step_size, state.x)
        momentum = state.x_adv - state.previous
        x_adv = state.x_adv + alpha * (stepped - state.x_adv) + (1 - alpha) * momentum
        return threat.project(x_adv, state.x)

    def checkpoints(self) -> set[int]:
        """The steps at which the step size may be halved: after 22 % of all steps, then at
        intervals that shrink by 3 % each, down to 6 %."""
        interval, checkpoints, step = max(int(0.22 * self.steps), 1), set[int](), -1
        shrink, smallest = (max(int(share * self.steps), 1) for share in (0.03, 0.06))
        while (step := step + interval) < self.steps:
            checkpoints.add(step)
            interval = max(interval - shrink, smallest)
        return checkpoints

    @property
    def reads_labels(self) -> bool:
        return self.loss != GIVEN

    def cost(self) -> int:
        return 3 * self.eot * (self.steps + 1)


@dataclass(frozen=True, kw_only=True)
class TargetedAPGD(Targeted):
    """APGD on the targeted DLR loss, for each of the most likely wrong classes."""

    steps: int = setting(100, "ascent steps per target", ge=1)
    eot: int = setting(1, "gradients averaged per step, for randomized networks", ge=1)

    def perturb_towards(
        self, loss: AttackTarget, x: Tensor, threat: ThreatModel, draws: Streams
    ) -> Tensor:
        apgd = APGD(steps=self.steps, eot=self.eot)
        return apgd.maximize(replace(loss, loss=targeted_dlr), x, threat, draws)

    def cost(self) -> int:
        return self.targets * APGD(steps=self.steps, eot=self.eot).cost()


def _drop_broken(
    result: Tensor, rows: Tensor, state: APGDState, loss: Loss
) -> tuple[Tensor, APGDState, Loss]:
    """With `until_broken`, store the misclassified images in `result` and go on without them."""
    broken = state.current.misclassified
    if not stops_when_broken(loss) or not broken.any():
        return rows, state, loss
    result[rows[broken]] = state.x_adv[broken]
    remaining = (~broken).nonzero().squeeze(1)
    return rows[remaining], state.select(remaining), select(loss, remaining)


def _where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(per_sample(condition, a), a, b)


def _select(value: Tensor | ValueAndGrad, rows: Tensor) -> Tensor | ValueAndGrad:
    if isinstance(value, ValueAndGrad):
        return ValueAndGrad(*(tensor[rows] for tensor in value))
    return value[rows]
