"""Adversarial training (Madry et al. 2018) in the paper's general form with labelled data."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dat.attacks import Loss, Victim
from dat.fields import setting
from dat.losses import cross_entropy
from dat.objectives.base import Batch, Network, Objective, Outcome, both


@dataclass(frozen=True, kw_only=True)
class Adversarial(Objective):
    """phi is the cross-entropy; `clean_weight` = 0 is plain AT, equation (1)."""

    clean_weight: float = setting(0.0, "lambda, the weight of the clean loss; 0 is plain AT", ge=0)
    label_smoothing: float = setting(
        0.0, "share of the label given to all classes in the outer loss", ge=0, lt=1
    )

    def phi(self, model: Network, batch: Batch) -> Loss:
        return Victim(model, batch.y)  # its loss is the cross-entropy

    def loss(self, model: Network, batch: Batch, x_adv: Tensor) -> Outcome:
        y = batch.y
        if self.clean_weight == 0:
            logits = model(x_adv)
            return Outcome(cross_entropy(logits, y, smoothing=self.label_smoothing), logits)
        clean, adversarial = both(model, batch.x, x_adv)
        loss = self.clean_weight * cross_entropy(clean, y, smoothing=self.label_smoothing)
        loss = loss + cross_entropy(adversarial, y, smoothing=self.label_smoothing)
        return Outcome(loss, adversarial)
