"""Smooth-AT (Salman et al. 2019): adversarial training of a smoothed classifier.

Each image has N copies with Gaussian noise. The attack maximizes the loss of their mean prediction,
and the update uses the attacked copies with the same noise. Without an attack this is Gaussian
noise augmentation (Cohen et al. 2019).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dat.attacks import AttackTarget, Loss
from dat.core.lazy import functional, torch
from dat.core.losses import cross_entropy
from dat.core.settings import SettingError, setting
from dat.objectives.base import Batch, Network, Objective, Outcome

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Noisy(Objective):
    """An objective on N noisy copies of each image, which the workers of a subgroup can share."""

    sigma: float = setting(0.25, "standard deviation of the noise, for pixels in [0, 1]", gt=0)
    copies: int = setting(2, "N: noisy copies of each image", ge=1)
    votes: int = setting(8, "noisy copies that vote in evaluation (TA and RA)", ge=1)

    def noisy(self, x: Tensor, batch: Batch) -> Tensor:
        """This worker's noisy copies of the images, concatenated."""
        own = batch.subgroup.share(self.copies)
        return torch.cat([x + self.sigma * batch.noise(copy) for copy in own])

    def vote(self, logits: Tensor, batch: Batch) -> Tensor:
        """The log of the mean probabilities over all copies, from the logits of this worker's."""
        log_p = functional.log_softmax(logits, dim=1).unflatten(0, (-1, len(batch.y)))
        return batch.subgroup.logsumexp(log_p.logsumexp(0)) - math.log(self.copies)

    def check_subgroup(self, size: int) -> None:
        if size > self.copies:
            raise SettingError(
                f"train.team = {size}: must be at most objective.copies = {self.copies}"
            )

    def check_patience(self) -> None:
        raise SettingError(
            "attack.patience: the noisy copies of objectives smooth and stability are attacked "
            "together, and none can leave early; set it to none"
        )

    def deployed(self, model: nn.Module) -> nn.Module:
        """The smoothed classifier with `votes` copies."""
        from dat.core.smoothing import Smoothed

        return Smoothed(model, sigma=self.sigma, copies=self.votes)


@dataclass(frozen=True, kw_only=True)
class Smooth(Noisy):
    """phi is -log of the mean probability of the label over the copies."""

    update: str = setting(
        "copies",
        "loss of the update; copies: the mean loss of the copies, soft: phi itself",
        choices=("copies", "soft"),
    )

    def phi(self, model: Network, batch: Batch) -> Loss:
        # log-probabilities are valid logits, so the cross-entropy of the vote is the soft loss
        return AttackTarget(
            lambda x: self.vote(model(self.noisy(batch.subgroup.spread(x), batch)), batch), batch.y
        )

    def loss(self, model: Network, batch: Batch, x_adv: Tensor) -> Outcome:
        logits = model(self.noisy(x_adv, batch))
        vote = self.vote(logits, batch)
        if self.update == "soft":
            loss = cross_entropy(vote, batch.y)
            # every worker of a subgroup has the full loss, but only its share of the gradient
            loss = loss - loss.detach() * (1 - 1 / batch.subgroup.size)
        else:
            losses = cross_entropy(logits, torch.cat([batch.y] * (len(logits) // len(batch.y))))
            loss = losses.unflatten(0, (-1, len(batch.y))).sum(0) / self.copies
        return Outcome(loss, vote)
