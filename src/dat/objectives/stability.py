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
        count, team = len(batch.y), batch.team
        mine = team.share(count)  # of the clean images a share as well: each is in the batch once
        some, noisy = model(
            torch.cat((batch.x[mine.start : mine.stop], self.noisy(x_adv, batch)))
        ).tensor_split((len(mine),))
        padded = functional.pad(some, (0, 0, mine.start, count - mine.stop))
        clean = team.spread(team.total(padded))
        own = len(noisy) / (count * self.copies)  # the share of the clean loss goes with the copies
        stray = self._stray(functional.softmax(clean, dim=1), noisy)
        loss = own * cross_entropy(clean, batch.y) + self.stability_weight * stray
        return Outcome(loss, self.vote(noisy, batch))

    def _stray(self, clean: Tensor, noisy: Tensor) -> Tensor:
        """This worker's share of phi."""
        each = functional.log_softmax(noisy, dim=1).unflatten(0, (-1, len(clean)))
        strayed: Tensor = -(clean * each).sum((0, 2)) / self.copies
        return strayed
