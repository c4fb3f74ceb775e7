"""Projected gradient ascent (Madry et al. 2018): the oracle of DAT-PGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from dat.attacks.base import Attack, Attempt, worst_of
from dat.attacks.victim import GIVEN, LOSSES, Loss, ascended, look, narrowed
from dat.fields import setting
from dat.rng import Draws
from dat.threat import ThreatModel


@dataclass(frozen=True, kw_only=True)
class PGD(Attack):
    """`steps` projected ascent steps; of several restarts, each sample keeps its worst."""

    steps: int = setting(10, "ascent steps k", ge=1)
    step_size: float | None = setting(None, "step size in pixels; none is 2.5 eps / steps", gt=0)
    random_start: bool = setting(True, "start from a random point of the ball")
    restarts: int = setting(1, "independent runs; the highest loss is kept", ge=1)
    loss: str = setting(
        GIVEN, "what to ascend; given is the objective's own", choices=(GIVEN, *LOSSES)
    )

    def perturb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Draws) -> Tensor:
        goal = ascended(loss, self.loss, "pgd.loss")

        def attempt(number: int) -> Attempt:
            streams = draws.fork("restart", number) if number else draws
            return lambda rows: self._ascend(
                narrowed(goal, rows), x[rows], threat, streams.pick(rows)
            )

        return worst_of(goal, x, [attempt(number) for number in range(self.restarts)])

    def _ascend(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Draws) -> Tensor:
        step = 2.5 * threat.eps / self.steps if self.step_size is None else self.step_size
        x_adv = threat.random_start(x, draws) if self.random_start else x
        for _ in range(self.steps):
            x_adv = threat.ascend(x_adv, look(loss, x_adv).gradient, step, x)
        return x_adv

    def rounds(self) -> Sequence[Attack]:
        return [replace(self, restarts=1)] * self.restarts

    @property
    def reads_labels(self) -> bool:
        return self.loss != GIVEN

    def cost(self) -> int:
        return 3 * self.steps * self.restarts
