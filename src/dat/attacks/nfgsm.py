"""N-FGSM (de Jorge et al. 2022): one step from strong noise, without projection."""

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
class NFGSM(Attack):
    """Noise of `noise` * eps, then one step of `step_ratio` * eps. By design, the result may lie
    outside the ball: this prevents catastrophic overfitting."""

    noise: float = setting(2.0, "magnitude of the noise in units of eps", ge=0)
    step_ratio: float = setting(1.0, "step size in units of eps", gt=0)

    @property
    def reach(self) -> float:
        return self.noise + self.step_ratio

    def perturb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Streams) -> Tensor:
        noisy = threat.scaled(self.noise).random_start(x, draws)
        enlarged = threat.scaled(self.reach)
        gradient = value_and_grad(loss, noisy).gradient
        return enlarged.ascend(noisy, gradient, self.step_ratio * threat.eps, x)

    def cost(self) -> int:
        return 3

    @property
    def single_step(self) -> bool:
        return True

    def sharding_conflict(self) -> str:
        return ""
