"""torch's AdamW: Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dat.core.lazy import torch
from dat.core.settings import setting
from dat.optim.base import TorchSettings, parameter_groups

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class AdamW(TorchSettings):
    """`torch.optim.AdamW`. The weight decay is decoupled from the moments: each step multiplies the
    weights by 1 - lr * weight_decay."""

    lr: float = setting(1e-3, "peak learning rate eta", gt=0)
    weight_decay: float = setting(0.01, "decoupled weight decay", ge=0)
    betas: tuple[float, float] = setting((0.9, 0.999), "decay rates of the moments", ge=0, lt=1)
    eps: float = setting(1e-8, "term added to sqrt(v) for stability", gt=0)
    decay_1d: bool = setting(True, "apply weight decay to biases and BN parameters")
    fused: bool = setting(
        True, "one fused kernel for all parameters; false: one operation at a time (foreach)"
    )

    def __call__(self, model: nn.Module, *, batch: int = 256) -> torch.optim.AdamW:
        groups = parameter_groups(
            model, lr=self.lr, weight_decay=self.weight_decay, decay_1d=self.decay_1d
        )
        optimizer = torch.optim.AdamW(
            groups,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            fused=self.fused,
            foreach=not self.fused,
        )
        return self.finish(optimizer)
