"""GradAlign (Andriushchenko & Flammarion 2020): gradients that point the same way in the ball."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dat.attacks import Loss, Victim
from dat.fields import setting
from dat.losses import cross_entropy
from dat.objectives.base import Batch, Network, Objective, Outcome

TINY = 1e-20


@dataclass(frozen=True, kw_only=True)
class GradAlign(Objective):
    """The adversarial cross-entropy, and weight * (1 - cosine) of the gradients at the image and at
    a random point of the ball: where they agree, one step is as good as many."""

    align_weight: float = setting(0.2, "weight of 1 - cosine", ge=0)

    def phi(self, model: Network, batch: Batch) -> Loss:
        return Victim(model, batch.y)

    @torch.enable_grad()
    def loss(self, model: Network, batch: Batch, x_adv: Tensor) -> Outcome:
        other = batch.threat.random_start(batch.x, batch.draws.fork("align"))
        places = torch.cat((batch.x, other)).detach().requires_grad_(True)
        near, adversarial = model(torch.cat((places, x_adv))).split((len(places), len(x_adv)))
        whole = cross_entropy(near, batch.y.repeat(2)).sum()
        (gradient,) = torch.autograd.grad(whole, places, create_graph=True)
        here, there = gradient.flatten(1).chunk(2)
        loss = cross_entropy(adversarial, batch.y)
        return Outcome(loss + self.align_weight * _apart(here, there), adversarial)


def _apart(here: Tensor, there: Tensor) -> Tensor:
    """1 - cosine, however short the gradients are: a confident image has tiny ones. One that is
    nought has no direction, and there is nothing to align."""
    sizes = [gradient.detach().abs().amax(1, keepdim=True) for gradient in (here, there)]
    some = (sizes[0] > TINY) & (sizes[1] > TINY)
    here, there = (
        gradient / torch.where(some, size, 1.0)
        for gradient, size in zip((here, there), sizes, strict=True)
    )
    apart = 1 - functional.cosine_similarity(here, there, dim=1)
    return torch.where(some.squeeze(1), apart, 0.0)
