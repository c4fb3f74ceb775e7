"""Stability training (Zheng et al. 2016; for certified robustness Li et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dat.attacks import Loss
from dat.core.lazy import functional, torch
from dat.core.losses import cross_entropy
from dat.core.settings import setting
from dat.objectives.base import Batch, Network, Outcome
from dat.objectives.smooth import Noisy

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Stability(Noisy):
    """The clean loss plus stability_weight * phi, the cross-entropy of the noisy copies relative to
    the clean prediction."""

    stability_weight: float = setting(2.0, "weight of phi", ge=0)

    def phi(self, model: Network, batch: Batch) -> Loss:
        with torch.no_grad():
            clean = functional.softmax(model(batch.x), dim=1)

        def phi(x: Tensor) -> Tensor:
            logits = model(self.noisy(batch.subgroup.spread(x), batch))
            return batch.subgroup.total(self._phi_share(clean, logits))

        return phi

    def loss(self, model: Network, batch: Batch, x_adv: Tensor) -> Outcome:
        count, subgroup = len(batch.y), batch.subgroup
        own = subgroup.share(count)  # the clean images are shared too: each is computed once
        own_clean, noisy = model(
            torch.cat((batch.x[own.start : own.stop], self.noisy(x_adv, batch)))
        ).tensor_split((len(own),))
        padded = functional.pad(own_clean, (0, 0, own.start, count - own.stop))
        clean = subgroup.spread(subgroup.total(padded))
        share = len(noisy) / (count * self.copies)  # the clean loss is split like the copies
        phi = self._phi_share(functional.softmax(clean, dim=1), noisy)
        loss = share * cross_entropy(clean, batch.y) + self.stability_weight * phi
        return Outcome(loss, self.vote(noisy, batch))

    def _phi_share(self, clean: Tensor, noisy: Tensor) -> Tensor:
        """This worker's share of phi."""
        log_p = functional.log_softmax(noisy, dim=1).unflatten(0, (-1, len(clean)))
        phi: Tensor = -(clean * log_p).sum((0, 2)) / self.copies
        return phi
