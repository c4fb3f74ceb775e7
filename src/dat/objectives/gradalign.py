"""GradAlign (Andriushchenko & Flammarion 2020): aligned gradients within the ball."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dat.core.lazy import functional, torch
from dat.core.losses import cross_entropy
from dat.core.settings import setting
from dat.objectives.base import Batch, Network, Outcome
from dat.objectives.labels import LabelSmoothing

if TYPE_CHECKING:
    from torch import Tensor

TINY = 1e-20


@dataclass(frozen=True, kw_only=True)
class GradAlign(LabelSmoothing):
    """Adversarial cross-entropy plus align_weight * (1 - cosine similarity) of the gradients at the
    image and at a random point of the ball. With aligned gradients, one attack step is as strong as
    many."""

    second_derivatives: ClassVar[bool] = True

    align_weight: float = setting(0.2, "weight of 1 - cosine similarity", ge=0)

    def loss(self, model: Network, batch: Batch, x_adv: Tensor) -> Outcome:
        other = batch.threat.random_start(batch.x, batch.draws.fork("align"))
        points = torch.cat((batch.x, other)).detach().requires_grad_(True)
        with torch.enable_grad():
            logits, adversarial = model(torch.cat((points, x_adv))).split((len(points), len(x_adv)))
            total = cross_entropy(logits, torch.cat((batch.y, batch.y))).sum()
            (gradient,) = torch.autograd.grad(total, points, create_graph=True)
            at_x, at_other = gradient.flatten(1).chunk(2)
            loss = self.cross_entropy(adversarial, batch.y)
            return Outcome(loss + self.align_weight * _misalignment(at_x, at_other), adversarial)

    def sharding_conflict(self) -> str:
        return (
            "objective gradalign needs second derivatives, which torch does not support for "
            "sharded models; use another"
        )


def _misalignment(a: Tensor, b: Tensor) -> Tensor:
    """1 - cosine similarity. Gradients are rescaled first, as those of confident predictions are
    tiny; a zero gradient has no direction and counts as aligned."""
    sizes = [gradient.detach().abs().amax(1, keepdim=True) for gradient in (a, b)]
    nonzero = (sizes[0] > TINY) & (sizes[1] > TINY)
    a, b = (
        gradient / torch.where(nonzero, size, 1.0)
        for gradient, size in zip((a, b), sizes, strict=True)
    )
    misalignment = 1 - functional.cosine_similarity(a, b, dim=1)
    return torch.where(nonzero.squeeze(1), misalignment, 0.0)
