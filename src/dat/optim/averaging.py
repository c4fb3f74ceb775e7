"""Weight averaging: a second model whose weights follow the trained ones slowly."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


class EMA:
    """Exponential moving average of the weights, in `module`, ready for evaluation.

    Update t = 0, 1, ... has decay min(decay, (1 + t) / (10 + t)), so that the random weights of the
    start are forgotten soon. Buffers (BN statistics) and whole numbers are the model's own.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay = {decay}: must be at least 0 and below 1")
        self.decay = decay
        self.updates = 0
        self.module = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        pairs = list(zip(self.module.parameters(), model.parameters(), strict=True))
        floating = [pair for pair in pairs if pair[0].is_floating_point()]
        averages, weights = zip(*floating, strict=True)
        torch._foreach_lerp_(averages, weights, 1 - decay)

        for own, new in zip(self.module.buffers(), model.buffers(), strict=True):
            own.copy_(new)
        for own, new in pairs:
            if not own.is_floating_point():
                own.copy_(new)

    def state_dict(self) -> dict[str, Any]:
        return {"module": self.module.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self.updates = state["updates"]
