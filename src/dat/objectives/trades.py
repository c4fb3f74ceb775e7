"""TRADES (Zhang et al. 2019): robustness as the distance between two predictions of one network."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dat.attacks import Loss, Victim
from dat.fields import setting
from dat.losses import cross_entropy, divergence
from dat.objectives.base import Batch, Network, Objective, Outcome, both


@dataclass(frozen=True, kw_only=True)
class TRADES(Objective):
    """The clean cross-entropy, and beta * KL(clean prediction, adversarial prediction).

    The attack ascends the KL, which is flat at the image itself: it needs a random start.
    """

    beta: float = setting(6.0, "weight of the KL beside the clean loss", ge=0)
    label_smoothing: float = setting(
        0.0, "share of the label given to all classes in the clean loss", ge=0, lt=1
    )

    def check_labels(self) -> None:
        """Without a label the clean loss is 0 and the KL is what it was (Stanforth et al. 2019)."""

    def phi(self, model: Network, batch: Batch) -> Loss:
        with torch.no_grad():
            clean = model(batch.x)
        return Victim(model, batch.y, loss=_strayed, targets=clean)

    def loss(self, model: Network, batch: Batch, x_adv: Tensor) -> Outcome:
        clean, adversarial = both(model, batch.x, x_adv)
        loss = cross_entropy(clean, batch.y, smoothing=self.label_smoothing)
        return Outcome(loss + self.beta * divergence(clean, adversarial), adversarial)


def _strayed(logits: Tensor, labels: Tensor, clean: Tensor) -> Tensor:
    return divergence(clean, logits)
