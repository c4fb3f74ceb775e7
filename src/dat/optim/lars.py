"""LARS: `paper` is LALR over momentum (eq. (3); Algorithm 1 of You et al. 2019, arXiv 1904.00962),
`classic` the original (Algorithm 1 of You et al. 2017, arXiv 1708.03888; reference: NVCaffe).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dat.fields import SettingError, setting
from dat.optim import kernel
from dat.optim.base import OuterOracle, parameter_groups
from dat.optim.directions import MomentumDirection, State
from dat.optim.lalr import LALR, Group, Layerwise


class ClassicLARS(Layerwise):
    """A layer's rate comes before its momentum, and the rate of the step is in the momentum too:

        ratio = trust_coefficient * ||theta|| / (||g|| + weight_decay * ||theta||)
        v <- momentum * v + lr * ratio * (g + weight_decay * theta),   theta <- theta - v

    The ratio is 1 where it would be 0 or 0/0: layers that start at zero have to leave it.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1.0,
        adapt: bool = True,
    ) -> None:
        if lr < 0 or weight_decay < 0 or trust_coefficient <= 0 or not 0 <= momentum < 1:
            raise ValueError(
                f"lr = {lr}, weight_decay = {weight_decay}, momentum = {momentum}, "
                f"trust_coefficient = {trust_coefficient}: out of range"
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "adapt": adapt,
        }
        super().__init__(params, defaults)

    def _direct(
        self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]
    ) -> tuple[list[Tensor], list[Tensor]]:
        self._begin(params, states)
        return list(torch._foreach_add(grads, params, alpha=group["weight_decay"])), grads

    def _ratio(self, group: Group, weight: Tensor, length: Tensor) -> Tensor:
        length = length + group["weight_decay"] * weight
        trust = group["trust_coefficient"] * weight / length
        return torch.where((weight > 0) & (length > 0), trust, 1.0)

    def _move(
        self,
        group: Group,
        params: list[Tensor],
        u: list[Tensor],
        states: list[State],
        ratios: Tensor | None,
    ) -> None:
        v = [state["v"] for state in states]
        torch._foreach_mul_(v, group["momentum"])
        if ratios is None:
            torch._foreach_add_(v, u, alpha=group["lr"])
        else:
            torch._foreach_addcmul_(v, u, ratios.unbind(), value=group["lr"])
        torch._foreach_sub_(params, v)

    def _update_natively(
        self, group: Group, params: list[Tensor], grads: list[Tensor]
    ) -> Tensor | None:
        return kernel.update(
            kernel.Moments(kind=kernel.CLASSIC, keep=group["momentum"]),
            *(params, grads, self._begin(params, [self.state[p] for p in params])),
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            adapt=group["adapt"],
            trust=group["trust_coefficient"],
        )

    def _begin(self, params: list[Tensor], states: list[State]) -> list[State]:
        for param, state in zip(params, states, strict=True):
            if not state:
                state["v"] = torch.zeros_like(param)
        return states


@dataclass(frozen=True, kw_only=True)
class LARS(OuterOracle):
    """Layer-wise rates over momentum SGD."""

    preset: str = setting(
        "paper",
        "paper: eq. (3) over momentum; classic: You et al. 2017, the rate before the momentum",
        choices=("paper", "classic"),
    )
    momentum: float = setting(0.9, "momentum", ge=0, lt=1)
    c_l: float = setting(0.0, "paper: lower bound of the scaling tau(||theta||)", ge=0)
    c_u: float = setting(
        10.0, "paper: upper bound of the scaling tau(||theta||)", gt=0, finite=False
    )
    # Only lr * trust_coefficient matters to an adapted layer. At 1, lr means the same as elsewhere,
    # also to the layers that are not adapted; You et al. have 0.001 and lr about 10.
    trust_coefficient: float = setting(
        1.0, "classic: trust coefficient; 1 with lr 0.01 is their 0.001 with lr 10", gt=0
    )
    decay_1d: bool = setting(True, "decay biases and BN scales and shifts")
    adapt_1d: bool = setting(True, "adapt the rate of biases and BN scales and shifts")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.c_l > self.c_u:
            raise SettingError(f"c_l = {self.c_l:g} is above c_u = {self.c_u:g}")

    def __call__(self, model: nn.Module, *, batch: int = 256) -> Layerwise:
        groups = parameter_groups(
            model,
            lr=self.lr,
            weight_decay=self.weight_decay,
            decay_1d=self.decay_1d,
            adapt=self.adapt_1d,
        )
        if self.preset == "classic":
            return ClassicLARS(
                groups,
                lr=self.lr,
                momentum=self.momentum,
                trust_coefficient=self.trust_coefficient,
            )
        direction = MomentumDirection(self.momentum)
        return LALR(groups, direction, lr=self.lr, c_l=self.c_l, c_u=self.c_u)
