"""The base directions u of eq. (3), which LALR normalizes layer by layer.

A direction stores its moments in the optimizer's state of each parameter, so that checkpoints
contain them, and adds the weight decay where its algorithm does. Its fields become options of
LALR's parameter groups, where schedulers look for `betas` and `momentum`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dat.core.lazy import torch
from dat.kernels import optimizer as kernel
from dat.optim.orthogonal import as_matrix, is_matrix, nesterov, orthogonalize

if TYPE_CHECKING:
    from torch import Tensor

State = dict[str, Any]


class Direction(Protocol):
    def __call__(
        self, params: list[Tensor], grads: list[Tensor], states: list[State], weight_decay: float
    ) -> list[Tensor]:
        """u for each parameter, weight decay included. It may alias the state: do not modify it."""


class NativeDirection(Direction):
    """A direction that the native kernel implements."""

    @abstractmethod
    def moments(self, params: list[Tensor], states: list[State]) -> kernel.Moments:
        """The update rule for the kernel, instead of a call; increments the step counts."""


@dataclass(frozen=True)
class AdamDirection(NativeDirection):
    """m / (sqrt(v) + zeta) + weight_decay * theta: lines 3 to 7 of Algorithm A2 (LAMB).

    A2 overwrites m and v by the debiased moments; as in Adam, the recursion here continues with the
    biased ones. A2 shows no weight decay; the paper uses it, and its code adds it to u.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    zeta: float = 1e-6
    debias: bool = True

    def __call__(
        self, params: list[Tensor], grads: list[Tensor], states: list[State], weight_decay: float
    ) -> list[Tensor]:
        self._init_state(params, states)
        m, v = [state["m"] for state in states], [state["v"] for state in states]
        beta1, beta2 = self.betas
        torch._foreach_lerp_(m, grads, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grads, grads, 1 - beta2)

        u = torch._foreach_sqrt(v)
        if self.debias:
            scales, offsets = zip(*map(self._denominator, states), strict=True)
            torch._foreach_mul_(u, scales)
            torch._foreach_add_(u, offsets)
        else:
            torch._foreach_add_(u, self.zeta)
        u = torch._foreach_div(m, u)
        if weight_decay:
            torch._foreach_add_(u, params, alpha=weight_decay)
        return list(u)

    def moments(self, params: list[Tensor], states: list[State]) -> kernel.Moments:
        self._init_state(params, states)
        beta1, beta2 = self.betas
        return kernel.Moments(
            kind=kernel.ADAM,
            first=1 - beta1,
            keep=beta2,
            second=1 - beta2,
            denominators=[self._denominator(state) for state in states],
        )

    def _init_state(self, params: list[Tensor], states: list[State]) -> None:
        for param, state in zip(params, states, strict=True):
            if not state:
                state |= {"step": 0, "m": torch.zeros_like(param), "v": torch.zeros_like(param)}
            state["step"] += 1

    def _denominator(self, state: State) -> tuple[float, float]:
        """(a, b) with m / (sqrt(v) * a + b) = m' / (sqrt(v') + zeta), where ' means debiased."""
        if not self.debias:
            return 1.0, self.zeta
        # each parameter has its own step count, as it may have had no gradient in some steps
        beta1, beta2 = self.betas
        first, second = 1 - beta1 ** state["step"], math.sqrt(1 - beta2 ** state["step"])
        return first / second, first * self.zeta


@dataclass(frozen=True)
class MomentumDirection(NativeDirection):
    """m = beta m + (1 - beta)(g + weight_decay * theta), with beta = `momentum`: Algorithm 1 (LARS)
    of You et al. 2019."""

    momentum: float = 0.9

    def __call__(
        self, params: list[Tensor], grads: list[Tensor], states: list[State], weight_decay: float
    ) -> list[Tensor]:
        self._init_state(params, states)
        m: list[Tensor] = [state["m"] for state in states]
        torch._foreach_lerp_(m, grads, 1 - self.momentum)
        if weight_decay:
            torch._foreach_add_(m, params, alpha=(1 - self.momentum) * weight_decay)
        return m

    def moments(self, params: list[Tensor], states: list[State]) -> kernel.Moments:
        self._init_state(params, states)
        return kernel.Moments(kind=kernel.MOMENTUM, first=1 - self.momentum)

    def _init_state(self, params: list[Tensor], states: list[State]) -> None:
        for param, state in zip(params, states, strict=True):
            if not state:
                state["m"] = torch.zeros_like(param)


@dataclass(frozen=True)
class MuonDirection:
    """Muon's direction: the Nesterov momentum of a layer, orthogonalized if the layer is a matrix
    (see `orthogonalize`), plus weight_decay * theta."""

    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5

    shardable: ClassVar[bool] = False
    """The rows that a worker holds do not determine the orthogonalized matrix."""

    def __call__(
        self, params: list[Tensor], grads: list[Tensor], states: list[State], weight_decay: float
    ) -> list[Tensor]:
        u = nesterov(params, grads, states, momentum=self.momentum, enabled=self.nesterov)
        for number, param in enumerate(params):
            if is_matrix(param):
                matrix = orthogonalize(as_matrix(u[number]), steps=self.ns_steps)
                u[number] = matrix.view(param.shape)
        return list(torch._foreach_add(u, params, alpha=weight_decay)) if weight_decay else u
