"""FGSM with a random start (Wong et al. 2020): one large step, the oracle of DAT-FGSM."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dat.attacks.base import Attack
from dat.attacks.victim import Loss, look
from dat.fields import setting
from dat.rng import Draws
from dat.threat import ThreatModel


@dataclass(frozen=True, kw_only=True)
class FGSM(Attack):
    """One ascent step of `step_ratio` * eps from a random point of the ball."""

    step_ratio: float = setting(1.25, "step size in units of eps", gt=0)
    random_start: bool = setting(True, "start from a random point of the ball")

    def perturb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Draws) -> Tensor:
        x_adv = threat.random_start(x, draws) if self.random_start else x
        gradient = look(loss, x_adv).gradient
        return threat.ascend(x_adv, gradient, self.step_ratio * threat.eps, x)

    def cost(self) -> int:
        return 3
