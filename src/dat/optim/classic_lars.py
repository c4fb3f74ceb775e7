"""The original LARS: Algorithm 1 of You et al. 2017, arXiv 1708.03888 (reference: NVCaffe)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from dat.kernels import optimizer as kernel
from dat.optim.directions import State
from dat.optim.lalr import Group, Layerwise, check_rates, scaled_rates


class ClassicLARS(Layerwise):
    """Scales the gradient by the layer's rate before the momentum, which includes lr:

        ratio = trust_coefficient * ||theta|| / (||g|| + weight_decay * ||theta||)
        v <- momentum * v + lr * ratio * (g + weight_decay * theta),   theta <- theta - v

    The ratio is 1 where it would be 0 or 0/0, so that layers that start at zero can learn.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.01,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1.0,
        adapt: bool = True,
        decay_1d: bool = True,
        adapt_1d: bool = True,
    ) -> None:
        check_rates(lr, weight_decay)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum = {momentum}: must be at least 0 and below 1")
        if trust_coefficient <= 0:
            raise ValueError(f"trust_coefficient = {trust_coefficient}: must be above 0")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "adapt": adapt,
            "decay_1d": decay_1d,
            "adapt_1d": adapt_1d,
        }
        super().__init__(params, defaults)

    def _direction(
        self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]
    ) -> tuple[list[Tensor], list[Tensor]]:
        self._init_state(params, states)
        return list(torch._foreach_add(grads, params, alpha=group["weight_decay"])), grads

    def _trust_ratio(self, group: Group, weight_norm: Tensor, norm: Tensor) -> Tensor:
        norm = norm + group["weight_decay"] * weight_norm
        ratio = group["trust_coefficient"] * weight_norm / norm
        return torch.where((weight_norm > 0) & (norm > 0), ratio, 1.0)

    def _apply_update(
        self,
        group: Group,
        params: list[Tensor],
        u: list[Tensor],
        states: list[State],
        ratios: Tensor | None,
    ) -> None:
        v = [state["v"] for state in states]
        torch._foreach_mul_(v, group["momentum"])
        lr = group["lr"]
        if isinstance(lr, Tensor):
            torch._foreach_addcmul_(v, u, scaled_rates(lr, params, ratios))
        elif ratios is None:
            torch._foreach_add_(v, u, alpha=lr)
        else:
            torch._foreach_addcmul_(v, u, ratios.unbind(), value=lr)
        torch._foreach_sub_(params, v)

    def _update_natively(
        self, group: Group, params: list[Tensor], grads: list[Tensor]
    ) -> Tensor | None:
        return kernel.update(
            kernel.Moments(kind=kernel.CLASSIC, keep=group["momentum"]),
            *(params, grads, self._init_state(params, [self.state[p] for p in params])),
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            adapt=group["adapt"],
            trust=group["trust_coefficient"],
        )

    def _init_state(self, params: list[Tensor], states: list[State]) -> list[State]:
        for param, state in zip(params, states, strict=True):
            if not state:
                state["v"] = torch.zeros_like(param)
        return states
