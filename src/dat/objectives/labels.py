"""Label smoothing (Szegedy et al. 2016) of the cross-entropy, with or without the attack's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dat.attacks import AttackTarget, Loss
from dat.core.losses import cross_entropy
from dat.core.settings import setting
from dat.objectives.base import Batch, Network, Objective

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LabelSmoothing(Objective):
    """An objective whose phi is the cross-entropy."""

    label_smoothing: float = setting(0.0, "label smoothing of the training loss", ge=0, lt=1)
    smooth_attack: bool = setting(
        False, "whether the attack maximizes the loss of the smoothed labels, too"
    )

    def phi(self, model: Network, batch: Batch) -> Loss:
        if not (self.smooth_attack and self.label_smoothing):
            return AttackTarget(model, batch.y)  # the default loss is the cross-entropy
        smoothed = partial(cross_entropy, smoothing=self.label_smoothing)
        return AttackTarget(model, batch.y, loss=smoothed)

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        """The training loss of each sample."""
        return cross_entropy(logits, y, smoothing=self.label_smoothing)
