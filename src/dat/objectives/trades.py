"""TRADES (Zhang et al. 2019): clean loss plus the divergence of the adversarial prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dat.attacks import AttackTarget, Loss
from dat.core.lazy import torch
from dat.core.losses import cross_entropy, kl_divergence
from dat.core.settings import setting
from dat.objectives.base import Batch, Network, Objective, Outcome, clean_and_adversarial

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TRADES(Objective):
    """Clean cross-entropy plus beta * KL(clean prediction, adversarial prediction).

    The attack maximizes the KL, whose gradient vanishes at the image itself, so it needs a random
    start.
    """

    beta: float = setting(6.0, "weight of the KL divergence", ge=0)
    label_smoothing: float = setting(0.0, "label smoothing of the clean loss", ge=0, lt=1)

    def check_labels(self) -> None:
        """Images without labels are fine: only the KL counts (Stanforth et al. 2019)."""

    def phi(self, model: Network, batch: Batch) -> Loss:
        with torch.no_grad():
            clean = model(batch.x)
        return AttackTarget(model, batch.y, loss=_divergence_from, targets=clean)

    def loss(self, model: Network, batch: Batch, x_adv: Tensor) -> Outcome:
        clean, adversarial = clean_and_adversarial(model, batch.x, x_adv)
        loss = cross_entropy(clean, batch.y, smoothing=self.label_smoothing)
        return Outcome(loss + self.beta * kl_divergence(clean, adversarial), adversarial)


def _divergence_from(logits: Tensor, labels: Tensor, clean: Tensor) -> Tensor:
    return kl_divergence(clean, logits)
