"""AWP (Wu et al. 2020): the weights are attacked as well, for any objective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from dat.comm import BaseExchange

TINY = 1e-12


@dataclass(frozen=True)
class WeightAttack:
    """Takes the update's gradient where the loss is higher: at w + gamma * ||w|| * g / ||g||, layer
    by layer, with g the gradient at w. It is the workers' common gradient, so all of them move
    their weights alike; that doubles both the passes and the communication."""

    gamma: float = 0.0
    """Size of the step in units of a layer's norm; 0 is none."""
    warmup: int = 0
    """Epochs without it at the beginning."""

    @contextmanager
    def __call__(
        self, exchange: BaseExchange, epoch: int, step: int, descend: Callable[[], None]
    ) -> Iterator[None]:
        """The weights are moved inside, and back in their place afterwards; `descend` computes the
        gradient at the weights as they are."""
        if self.gamma == 0 or epoch < self.warmup:
            yield
            return
        model = exchange.module
        statistics = [(buffer, buffer.clone()) for buffer in model.buffers()]
        exchange.begin(epoch, -1 - step)  # other random numbers than those of the update
        with exchange.aside():
            descend()
        moved = _ascend(model, self.gamma)
        with torch.no_grad():
            for buffer, before in statistics:  # what was seen on the way is not remembered
                buffer.copy_(before)
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, before in moved:
                    weight.copy_(before)


@torch.no_grad()
def _ascend(model: nn.Module, gamma: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Move every matrix and kernel; what they were before."""
    moved: list[tuple[torch.Tensor, torch.Tensor]] = []
    for weight in model.parameters():
        if weight.dim() > 1 and weight.grad is not None:
            moved.append((weight, weight.clone()))
            length = weight.grad.norm().clamp_min(TINY)
            weight.add_(weight.grad * (gamma * weight.norm() / length))
    return moved
