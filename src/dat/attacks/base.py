"""What every attack is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dat.fields import Settings
from dat.rng import Draws
from dat.threat import ThreatModel

Loss = Callable[[Tensor], Tensor]
"""What the attack ascends: a batch of images to one loss each."""


@dataclass(frozen=True, kw_only=True)
class Attack(Settings, ABC):
    """An approximate solution of max over the threat model of a loss, for each sample alone."""

    def __call__(
        self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Draws | None = None
    ) -> Tensor:
        """Adversarial examples: in the ball around `x`, in [0, 1], and not requiring gradients.

        Without `draws` the samples are numbered 0, 1, ... and the seed is 0.
        """
        if draws is None:
            draws = Draws.of(0, "attack", index=torch.arange(len(x), device=x.device))
        return self.perturb(loss, x.detach(), threat, draws)

    @abstractmethod
    def perturb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Draws) -> Tensor: ...


def input_gradient(loss: Loss, x: Tensor) -> Tensor:
    """d loss / d x. `autograd.grad` leaves the parameters' own gradients alone."""
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        return torch.autograd.grad(loss(x).sum(), x)[0]
