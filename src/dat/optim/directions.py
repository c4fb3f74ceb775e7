"""The base directions u of eq. (3): what LALR normalises layer by layer.

A direction keeps its moments in the optimizer's state of each parameter, so that a checkpoint holds
them, and adds the weight decay at the place where its algorithm has it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

State = dict[str, Any]


class Direction(Protocol):
    def __call__(
        self, params: list[Tensor], grads: list[Tensor], states: list[State], weight_decay: float
    ) -> list[Tensor]:
        """u for each parameter, weight decay included. It may be the state itself: read only."""


@dataclass(frozen=True)
class AdamDirection:
    """m / (sqrt(v) + zeta) + weight_decay * theta: lines 3 to 7 of Algorithm A2 (LAMB).

    A2 writes the debiased moments over m and v; as in Adam, the recursion goes on with the biased
    ones. A2 shows no weight decay; the paper trains with it, and its code adds it to u.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    zeta: float = 1e-6
    debias: bool = True

    def __call__(
        self, params: list[Tensor], grads: list[Tensor], states: list[State], weight_decay: float
    ) -> list[Tensor]:
        for param, state in zip(params, states, strict=True):
            if not state:
                state |= {"step": 0, "m": torch.zeros_like(param), "v": torch.zeros_like(param)}
            state["step"] += 1
        m, v = [state["m"] for state in states], [state["v"] for state in states]
        beta1, beta2 = self.betas
        torch._foreach_lerp_(m, grads, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grads, grads, 1 - beta2)

        u = torch._foreach_sqrt(v)
        if self.debias:
            # each parameter has its own count: it may have had no gradient in some steps
            unbiased = [(1 - beta1 ** s["step"], math.sqrt(1 - beta2 ** s["step"])) for s in states]
            torch._foreach_mul_(u, [first / second for first, second in unbiased])
            torch._foreach_add_(u, [first * self.zeta for first, _ in unbiased])
        else:
            torch._foreach_add_(u, self.zeta)
        u = torch._foreach_div(m, u)
        if weight_decay:
            torch._foreach_add_(u, params, alpha=weight_decay)
        return list(u)


@dataclass(frozen=True)
class MomentumDirection:
    """m = beta m + (1 - beta)(g + weight_decay * theta): Algorithm 1 (LARS) of You et al. 2019."""

    beta: float = 0.9

    def __call__(
        self, params: list[Tensor], grads: list[Tensor], states: list[State], weight_decay: float
    ) -> list[Tensor]:
        for param, state in zip(params, states, strict=True):
            if not state:
                state["m"] = torch.zeros_like(param)
        m: list[Tensor] = [state["m"] for state in states]
        torch._foreach_lerp_(m, grads, 1 - self.beta)
        if weight_decay:
            torch._foreach_add_(m, params, alpha=(1 - self.beta) * weight_decay)
        return m
