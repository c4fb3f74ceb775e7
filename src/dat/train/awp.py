"""Adversarial weight perturbation (AWP, Wu et al. 2020), for any objective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dat.core.lazy import torch
from dat.core.settings import setting
from dat.train.part import Option

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dat.train.worker import Worker

TINY = 1e-12


@dataclass(frozen=True, kw_only=True)
class AWP(Option):
    """Computes the update's gradient at perturbed weights w + gamma * ||w|| * g / ||g||, layer by
    layer, where g is the gradient at w, summed over the workers, so that all of them perturb their
    weights identically. Doubles the number of passes and the communication."""

    gamma: float = setting(
        0.0,
        "AWP: size of the weight perturbation, relative to each layer's norm; 0: no AWP",
        ge=0,
        key="awp",
    )
    warmup: int = setting(0, "AWP: number of initial epochs without it", ge=0, key="awp_warmup")

    @contextmanager
    def around_update(
        self, worker: Worker, epoch: int, step: int, descend: Callable[[], None]
    ) -> Iterator[None]:
        """Perturb the weights inside the context, and restore them afterwards."""
        if self.gamma == 0 or epoch < self.warmup:
            yield
            return
        exchange = worker.exchange
        model = exchange.module
        statistics = [(buffer, buffer.clone()) for buffer in model.buffers()]
        exchange.begin(epoch, -1 - step)  # a different random stream from the update's
        with exchange.without_error_feedback():
            descend()
        perturbed = _ascend(model, self.gamma)
        with torch.no_grad():
            for buffer, before in statistics:  # the extra pass must not change running statistics
                buffer.copy_(before)
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, before in perturbed:
                    weight.copy_(before)

    def sharding_conflict(self) -> str:
        return "AWP needs unsharded weights; use train.awp 0" if self.gamma else ""


def _ascend(model: nn.Module, gamma: float) -> list[tuple[Tensor, Tensor]]:
    """Perturb every matrix and kernel. Returns them with their original values."""
    perturbed: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1 and weight.grad is not None:
                perturbed.append((weight, weight.clone()))
                length = weight.grad.norm().clamp_min(TINY)
                weight.add_(weight.grad * (gamma * weight.norm() / length))
    return perturbed
