"""Free adversarial training (Shafahi et al. 2019): the update's backward pass attacks as well."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dat.attacks.base import Attack
from dat.attacks.victim import Loss, look
from dat.fields import setting
from dat.rng import Draws
from dat.threat import ThreatModel


@dataclass(frozen=True, kw_only=True)
class Free(Attack):
    """Each batch is trained on `replays` times in a row. Every backward pass gives the gradient of
    the weights and that of the images, and the perturbation goes on from where it was; so an epoch
    is worth m, and the attack costs nothing.

    Called like any other attack, it takes as many steps on a network that stands still.
    """

    replays: int = setting(4, "how often a batch is trained on in a row, m", ge=1)
    step_ratio: float = setting(1.0, "step size in units of eps", gt=0)
    random_start: bool = setting(False, "start from a random point of the ball")

    def perturb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Draws) -> Tensor:
        x_adv = self.start(x, threat, draws)
        for _ in range(self.replays):
            x_adv = self.ascend(x_adv, look(loss, x_adv).gradient, x, threat)
        return x_adv

    def start(self, x: Tensor, threat: ThreatModel, draws: Draws) -> Tensor:
        """Where the first replay begins."""
        return threat.random_start(x, draws) if self.random_start else x.clone()

    def ascend(self, x_adv: Tensor, gradient: Tensor, x: Tensor, threat: ThreatModel) -> Tensor:
        """From one replay to the next."""
        return threat.ascend(x_adv, gradient, self.step_ratio * threat.eps, x)

    def cost(self) -> int:
        return 3 * self.replays
