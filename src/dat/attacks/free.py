"""Free adversarial training (Shafahi et al. 2019): the backward pass of the update also drives the
attack."""

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
class Free(Attack):
    """Trains on each batch `replays` times in a row. Every backward pass yields the gradients of
    the weights and of the images, and the perturbation continues from the last replay, so the
    attack costs nothing extra, and one epoch is worth m.

    Called like any other attack, it takes as many steps on a fixed network.
    """

    replays: int = setting(4, "m: number of times in a row a batch is trained on", ge=1)
    step_ratio: float = setting(1.0, "step size in units of eps", gt=0)
    random_start: bool = setting(False, "start from a random point of the ball")

    def perturb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Streams) -> Tensor:
        x_adv = self.start(x, threat, draws)
        for _ in range(self.replays):
            x_adv = self.ascend(x_adv, value_and_grad(loss, x_adv).gradient, x, threat)
        return x_adv

    def start(self, x: Tensor, threat: ThreatModel, draws: Streams) -> Tensor:
        """The starting point of the first replay."""
        return threat.random_start(x, draws) if self.random_start else x.clone()

    def ascend(self, x_adv: Tensor, gradient: Tensor, x: Tensor, threat: ThreatModel) -> Tensor:
        """The step from one replay to the next."""
        return threat.ascend(x_adv, gradient, self.step_ratio * threat.eps, x)

    def cost(self) -> int:
        return 3 * self.replays

    @property
    def starts_from(self) -> str:
        return "replay"

    @property
    def batch_replays(self) -> int:
        return self.replays

    @property
    def single_step(self) -> bool:
        return True

    def sharding_conflict(self) -> str:
        return ""
