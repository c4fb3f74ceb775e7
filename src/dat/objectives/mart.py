"""MART (Wang et al. 2020): misclassified images count more."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dat.attacks import Loss, Victim
from dat.fields import setting
from dat.losses import boosted_cross_entropy, divergence
from dat.objectives.base import Batch, Network, Objective, Outcome, both


@dataclass(frozen=True, kw_only=True)
class MART(Objective):
    """The boosted cross-entropy of the adversarial image, and weight * KL * (1 - p(label)), where p
    is the clean prediction."""

    beta: float = setting(5.0, "weight of the KL", ge=0)

    def phi(self, model: Network, batch: Batch) -> Loss:
        return Victim(model, batch.y)

    def loss(self, model: Network, batch: Batch, x_adv: Tensor) -> Outcome:
        clean, adversarial = both(model, batch.x, x_adv)
        doubt = 1 - clean.softmax(1).gather(1, batch.y.unsqueeze(1)).squeeze(1)
        loss = boosted_cross_entropy(adversarial, batch.y)
        return Outcome(loss + self.beta * doubt * divergence(clean, adversarial), adversarial)
