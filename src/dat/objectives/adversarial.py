"""Adversarial training (Madry et al. 2018), in the paper's general form for labelled data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dat.attacks import AttackTarget, Loss
from dat.core.losses import cross_entropy
from dat.core.settings import setting
from dat.objectives.base import Batch, Network, Objective, Outcome, clean_and_adversarial

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Adversarial(Objective):
    """phi is the cross-entropy; `clean_weight` = 0 is plain AT, equation (1)."""

    clean_weight: float = setting(0.0, "lambda: weight of the clean loss; 0: plain AT", ge=0)
    label_smoothing: float = setting(
        0.0, "label smoothing of the training loss, not of the attack", ge=0, lt=1
    )

    def phi(self, model: Network, batch: Batch) -> Loss:
        return AttackTarget(model, batch.y)  # the default loss is the cross-entropy

    def loss(self, model: Network, batch: Batch, x_adv: Tensor) -> Outcome:
        y = batch.y
        if self.clean_weight == 0:
            logits = model(x_adv)
            return Outcome(cross_entropy(logits, y, smoothing=self.label_smoothing), logits)
        clean, adversarial = clean_and_adversarial(model, batch.x, x_adv)
        loss = self.clean_weight * cross_entropy(clean, y, smoothing=self.label_smoothing)
        loss = loss + cross_entropy(adversarial, y, smoothing=self.label_smoothing)
        return Outcome(loss, adversarial)
