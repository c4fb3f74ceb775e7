"""Stability training (Zheng et al. 2016; for certified robustness Li et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dat.attacks import Loss
from dat.fields import setting
from dat.losses import cross_entropy
from dat.objectives.base import Batch, Network, Outcome
from dat.objectives.smooth import Noisy


@dataclass(frozen=True, kw_only=True)
class Stability(Noisy):
    """The clean loss, and phi = the cross-entropy from the clean prediction to the copies'."""

    stability_weight: float = setting(2.0, "weight of phi beside the clean loss", ge=0)

    def phi(self, model: Network, batch: Batch) -> Loss:
        with torch.no_grad():
            clean = functional.softmax(model(batch.x), dim=1)

        def strayed(x: Tensor) -> Tensor:
            logits = model(self.noisy(batch.team.spread(x), batch))
            return batch.team.total(self._stray(clean, logits))

        return strayed

    def loss(self, model: Network, batch: Batch, x_adv: Tensor) -> Outcome:
        count = len(batch.y)
        clean, noisy = model(torch.cat((batch.x, self.noisy(x_adv, batch)))).split_with_sizes(
            (count, count * len(batch.team.share(self.copies)))
        )
        own = len(noisy) / (count * self.copies)  # the share of the clean loss goes with the copies
        stray = self._stray(functional.softmax(clean, dim=1), noisy)
        return Outcome(own * cross_entropy(clean, batch.y) + self.stability_weight * stray, clean)

    def _stray(self, clean: Tensor, noisy: Tensor) -> Tensor:
        """This worker's share of phi."""
        each = functional.log_softmax(noisy, dim=1).unflatten(0, (-1, len(clean)))
        strayed: Tensor = -(clean * each).sum((0, 2)) / self.copies
        return strayed
