"""Adversarial logit pairing (Kannan et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dat.attacks import Loss, Victim
from dat.fields import setting
from dat.losses import cross_entropy
from dat.objectives.base import Batch, Network, Objective, Outcome, both


@dataclass(frozen=True, kw_only=True)
class LogitPairing(Objective):
    """Clean and adversarial cross-entropy, and the mean squared distance of their logits."""

    clean_weight: float = setting(1.0, "lambda, the weight of the clean loss", ge=0)
    pairing_weight: float = setting(0.5, "weight of the distance of the logits", ge=0)

    def phi(self, model: Network, batch: Batch) -> Loss:
        return Victim(model, batch.y)

    def loss(self, model: Network, batch: Batch, x_adv: Tensor) -> Outcome:
        clean, adversarial = both(model, batch.x, x_adv)
        loss = self.clean_weight * cross_entropy(clean, batch.y)
        loss = loss + cross_entropy(adversarial, batch.y)
        apart = (clean - adversarial).square().mean(1)
        return Outcome(loss + self.pairing_weight * apart, adversarial)
