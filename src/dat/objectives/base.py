"""What every objective is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from dat.attacks import Loss
from dat.fields import Settings

Network = Callable[[Tensor], Tensor]
"""Images in [0, 1] to logits: a module, or a module whose gradients are exchanged."""


class Outcome(NamedTuple):
    """What a batch came to."""

    loss: Tensor
    """The objective of each sample."""
    logits: Tensor
    """The logits of each adversarial example."""


@dataclass(frozen=True, kw_only=True)
class Objective(Settings, ABC):
    """One choice of loss, phi and lambda."""

    @abstractmethod
    def phi(self, model: Network, x: Tensor, y: Tensor) -> Loss:
        """What the inner oracle ascends at x, as a function of the adversarial images."""

    @abstractmethod
    def loss(self, model: Network, x: Tensor, x_adv: Tensor, y: Tensor) -> Outcome:
        """lambda * loss(x) + phi(x_adv), per sample. It calls `model` once: two forwards before one
        backward would break batch normalisation under DDP, and one larger forward is faster."""
