"""Smooth-AT (Salman et al. 2019): train the network that many noisy copies of an image vote on.

Each image gets N copies with Gaussian noise. The attack raises the loss of the copies' mean
prediction, and the update learns from the attacked copies, with the very noise that was attacked.
Without an attack this is training with Gaussian noise (Cohen et al. 2019).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from dat.attacks import Loss, Victim
from dat.fields import SettingError, setting
from dat.losses import cross_entropy
from dat.objectives.base import Batch, Network, Objective, Outcome
from dat.smoothing import Smoothed


@dataclass(frozen=True, kw_only=True)
class Noisy(Objective):
    """An objective on N noisy copies of each image; a team can share them out."""

    sigma: float = setting(0.25, "standard deviation of the noise, for pixels in [0, 1]", gt=0)
    copies: int = setting(2, "noisy copies N of each image", ge=1)
    votes: int = setting(8, "noisy copies that vote when TA and RA are measured", ge=1)

    def noisy(self, x: Tensor, batch: Batch) -> Tensor:
        """This worker's copies of the images, one after the other."""
        own = batch.team.share(self.copies)
        return torch.cat([x + self.sigma * batch.noise(copy) for copy in own])

    def vote(self, logits: Tensor, batch: Batch) -> Tensor:
        """log of the mean of all copies' probabilities, of which these are this worker's."""
        each = functional.log_softmax(logits, dim=1).unflatten(0, (-1, len(batch.y)))
        return batch.team.logsumexp(each.logsumexp(0)) - math.log(self.copies)

    def check_team(self, size: int) -> None:
        if size > self.copies:
            raise SettingError(
                f"train.team = {size}: must be at most objective.copies = {self.copies}"
            )

    def check_patience(self) -> None:
        raise SettingError(
            "attack.patience: the noisy copies of objectives smooth and stability are attacked "
            "together, and none leaves early; set it to none"
        )

    def deployed(self, model: nn.Module) -> nn.Module:
        """The vote, by `votes` copies."""
        return Smoothed(model, sigma=self.sigma, copies=self.votes)


@dataclass(frozen=True, kw_only=True)
class Smooth(Noisy):
    """phi is -log of the copies' mean probability of the right class."""

    update: str = setting(
        "copies",
        "what the update descends: the mean loss of the copies, or phi itself (soft)",
        choices=("copies", "soft"),
    )

    def phi(self, model: Network, batch: Batch) -> Loss:
        # log-probabilities are logits, so the cross-entropy of the vote is the soft loss
        return Victim(
            lambda x: self.vote(model(self.noisy(batch.team.spread(x), batch)), batch), batch.y
        )

    def loss(self, model: Network, batch: Batch, x_adv: Tensor) -> Outcome:
        logits = model(self.noisy(x_adv, batch))
        vote = self.vote(logits, batch)
        if self.update == "soft":
            loss = cross_entropy(vote, batch.y)
            # every worker of a team has the whole loss, and its share of the gradient
            loss = loss - loss.detach() * (1 - 1 / batch.team.size)
        else:
            each = cross_entropy(logits, batch.y.repeat(len(logits) // len(batch.y)))
            loss = each.unflatten(0, (-1, len(batch.y))).sum(0) / self.copies
        return Outcome(loss, vote)
