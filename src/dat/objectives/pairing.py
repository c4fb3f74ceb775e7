"""Adversarial logit pairing (Kannan et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dat.core.settings import setting
from dat.objectives.base import Batch, Network, Outcome, clean_and_adversarial
from dat.objectives.labels import LabelSmoothing

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LogitPairing(LabelSmoothing):
    """Clean and adversarial cross-entropy plus the mean squared distance between their logits."""

    clean_weight: float = setting(1.0, "lambda: weight of the clean loss", ge=0)
    pairing_weight: float = setting(0.5, "weight of the distance between the logits", ge=0)

    def loss(self, model: Network, batch: Batch, x_adv: Tensor) -> Outcome:
        clean, adversarial = clean_and_adversarial(model, batch.x, x_adv)
        loss = self.clean_weight * self.cross_entropy(clean, batch.y)
        loss = loss + self.cross_entropy(adversarial, batch.y)
        distance = (clean - adversarial).square().mean(1)
        return Outcome(loss + self.pairing_weight * distance, adversarial)
