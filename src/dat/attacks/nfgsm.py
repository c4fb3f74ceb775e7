"""N-FGSM (de Jorge et al. 2022): one step from strong noise, and no projection."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from dat.attacks.base import Attack
from dat.attacks.victim import Loss, look
from dat.fields import setting
from dat.rng import Draws
from dat.threat import ThreatModel


@dataclass(frozen=True, kw_only=True)
class NFGSM(Attack):
    """Noise of `noise` * eps, then one step of `step_ratio` * eps. The image may end up outside of
    the ball, by design: that is what keeps single-step training from collapsing."""

    noise: float = setting(2.0, "size of the noise, in units of eps", ge=0)
    step_ratio: float = setting(1.0, "step size in units of eps", gt=0)

    @property
    def reach(self) -> float:
        return self.noise + self.step_ratio

    def perturb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Draws) -> Tensor:
        noisy = replace(threat, eps=self.noise * threat.eps).random_start(x, draws)
        whole = replace(threat, eps=self.reach * threat.eps)
        return whole.ascend(noisy, look(loss, noisy).gradient, self.step_ratio * threat.eps, x)

    def cost(self) -> int:
        return 3
