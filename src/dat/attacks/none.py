"""No attack: standard training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dat.attacks.base import Attack
from dat.attacks.target import Loss
from dat.core.rng import Streams
from dat.core.threat import ThreatModel

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class NoAttack(Attack):
    """Returns the images unchanged."""

    def perturb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Streams) -> Tensor:
        return x

    def sharding_conflict(self) -> str:
        return ""
