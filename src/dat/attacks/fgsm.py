"""FGSM with a random start (Wong et al. 2020): one large step, the attack of DAT-FGSM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dat.attacks.base import Attack
from dat.attacks.target import Loss, value_and_grad
from dat.core.rng import Streams
from dat.core.settings import setting
from dat.core.threat import ThreatModel

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class FGSM(Attack):
    """One ascent step of `step_ratio` * eps from a random point of the ball."""

    step_ratio: float = setting(1.25, "step size in units of eps", gt=0)
    random_start: bool = setting(True, "start from a random point of the ball")

    def perturb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Streams) -> Tensor:
        x_adv = threat.random_start(x, draws) if self.random_start else x
        gradient = value_and_grad(loss, x_adv).gradient
        return threat.ascend(x_adv, gradient, self.step_ratio * threat.eps, x)

    def cost(self) -> int:
        return 3

    @property
    def single_step(self) -> bool:
        return True

    def sharding_conflict(self) -> str:
        return ""
