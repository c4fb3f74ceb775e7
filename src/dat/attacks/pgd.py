"""Projected gradient ascent (Madry et al. 2018): the oracle of DAT-PGD."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dat.attacks.base import Attack, Loss, input_gradient
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

    def perturb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Draws) -> Tensor:
        worst = self._ascend(loss, x, threat, draws)
        if self.restarts > 1:
            with torch.no_grad():
                highest = loss(worst)
        for restart in range(1, self.restarts):
            other = self._ascend(loss, x, threat, draws.fork("restart", restart))
            with torch.no_grad():
                reached = loss(other)
            better = (reached > highest).reshape(-1, *[1] * (x.dim() - 1))
            worst, highest = torch.where(better, other, worst), torch.maximum(reached, highest)
        return worst

    def _ascend(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Draws) -> Tensor:
        step = 2.5 * threat.eps / self.steps if self.step_size is None else self.step_size
        x_adv = threat.random_start(x, draws) if self.random_start else x
        for _ in range(self.steps):
            x_adv = threat.ascend(x_adv, input_gradient(loss, x_adv), step, x)
        return x_adv
