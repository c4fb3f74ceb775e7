"""MART (Wang et al. 2020): misclassified images get a larger weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dat.attacks import AttackTarget, Loss
from dat.core.losses import boosted_cross_entropy, kl_divergence
from dat.core.settings import setting
from dat.objectives.base import Batch, Network, Objective, Outcome, clean_and_adversarial

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class MART(Objective):
    """Boosted cross-entropy of the adversarial image plus beta * KL * (1 - p(label)), where p is
    the clean prediction."""

    beta: float = setting(5.0, "weight of the KL divergence", ge=0)

    def soft_labels_conflict(self) -> str:
        return "objective mart needs one label per image; use at, trades or alp"

    def phi(self, model: Network, batch: Batch) -> Loss:
        return AttackTarget(model, batch.y)

    def loss(self, model: Network, batch: Batch, x_adv: Tensor) -> Outcome:
        clean, adversarial = clean_and_adversarial(model, batch.x, x_adv)
        p_wrong = 1 - clean.softmax(1).gather(1, batch.y.unsqueeze(1)).squeeze(1)
        loss = boosted_cross_entropy(adversarial, batch.y)
        return Outcome(loss + self.beta * p_wrong * kl_divergence(clean, adversarial), adversarial)
