"""Weight averaging: a second model with averaged weights."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from dat.core.lazy import torch

if TYPE_CHECKING:
    from torch import nn


class EMA:
    """Exponential moving average of the weights; `module` is ready for evaluation.

    With `warmup`, update t = 0, 1, ... has decay min(decay, (1 + t) / (10 + t)), so that the
    initial random weights fade quickly. Buffers (BN statistics) and integer parameters are copied,
    not averaged.
    """

    def __init__(self, model: nn.Module, decay: float, *, warmup: bool = True) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay = {decay}: must be at least 0 and below 1")
        self.decay, self.warmup = decay, warmup
        self.updates = 0
        self.module = copy.deepcopy(model).eval().requires_grad_(False)

    def update(self, model: nn.Module) -> None:
        early = (1 + self.updates) / (10 + self.updates) if self.warmup else 1.0
        decay = min(self.decay, early)
        self.updates += 1
        pairs = list(zip(self.module.parameters(), model.parameters(), strict=True))
        floating = [pair for pair in pairs if pair[0].is_floating_point()]
        averages, weights = zip(*floating, strict=True)
        with torch.no_grad():
            torch._foreach_lerp_(averages, weights, 1 - decay)
            for buffer, new in zip(self.module.buffers(), model.buffers(), strict=True):
                buffer.copy_(new)
            for parameter, new in pairs:
                if not parameter.is_floating_point():
                    parameter.copy_(new)

    def state_dict(self) -> dict[str, Any]:
        return {"module": self.module.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self.updates = state["updates"]
