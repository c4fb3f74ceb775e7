"""What every outer minimisation oracle is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dat.fields import Settings, setting


@dataclass(frozen=True, kw_only=True)
class OuterOracle(Settings, ABC):
    """The settings of an optimizer; called with a model, they make it."""

    lr: float = setting(0.01, "peak learning rate eta", gt=0)
    weight_decay: float = setting(1e-4, "weight decay", ge=0)

    @abstractmethod
    def __call__(self, model: nn.Module, *, batch: int = 256) -> torch.optim.Optimizer:
        """An optimizer of the model's trainable parameters; `batch` is the global batch size."""


def parameter_groups(
    model: nn.Module, *, lr: float, weight_decay: float, decay_1d: bool, **vectors: Any
) -> list[dict[str, Any]]:
    """Weights in one group; biases, BN scales and shifts (at most one dimension) in another.

    `vectors` are options of the second group alone. `initial_lr` keeps the peak rate, also in a
    checkpoint, for `set_rate` and torch's own schedulers.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    common = {"lr": lr, "initial_lr": lr}
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in trainable if p.dim() > 1],
            "weight_decay": weight_decay,
            **common,
        },
        {
            "params": [p for p in trainable if p.dim() <= 1],
            "weight_decay": weight_decay if decay_1d else 0.0,
            **common,
            **vectors,
        },
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ValueError(f"{type(model).__name__} has no trainable parameters")
    return groups


def scale_rates(
    optimizer: torch.optim.Optimizer, factors: Mapping[Tensor, float]
) -> torch.optim.Optimizer:
    """Give each parameter its factor of the rate, by groups of its own; 1 where there is none.

    The groups with the highest factor come first: theirs is the rate that is reported.
    """
    parts: list[tuple[float, dict[str, Any]]] = []
    for group in optimizer.param_groups:
        peak = group.get("initial_lr", group["lr"])
        own = [factors.get(parameter, 1.0) for parameter in group["params"]]
        for factor in dict.fromkeys(own):
            params = [p for p, its in zip(group["params"], own, strict=True) if its == factor]
            rates = {"lr": group["lr"] * factor, "initial_lr": peak * factor}
            parts.append((factor, {**group, "params": params, **rates}))
    parts.sort(key=lambda part: -part[0])
    optimizer.param_groups[:] = [group for _, group in parts]
    return optimizer
