"""Adversarial training (Madry et al. 2018), in the paper's general form for labelled data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dat.core.settings import setting
from dat.objectives.base import Batch, Network, Outcome, clean_and_adversarial
from dat.objectives.labels import LabelSmoothing

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Adversarial(LabelSmoothing):
    """phi is the cross-entropy; `clean_weight` = 0 is plain AT, equation (1)."""

    clean_weight: float = setting(0.0, "lambda: weight of the clean loss; 0: plain AT", ge=0)

    def loss(self, model: Network, batch: Batch, x_adv: Tensor) -> Outcome:
        y = batch.y
        if self.clean_weight == 0:
            logits = model(x_adv)
            return Outcome(self.cross_entropy(logits, y), logits)
        clean, adversarial = clean_and_adversarial(model, batch.x, x_adv)
        loss = self.clean_weight * self.cross_entropy(clean, y)
        return Outcome(loss + self.cross_entropy(adversarial, y), adversarial)
