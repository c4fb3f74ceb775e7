"""No attack: adversarial training becomes standard training."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dat.attacks.base import Attack
from dat.attacks.victim import Loss
from dat.rng import Draws
from dat.threat import ThreatModel


@dataclass(frozen=True, kw_only=True)
class NoAttack(Attack):
    """Leaves the images as they are."""

    def perturb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Draws) -> Tensor:
        return x
