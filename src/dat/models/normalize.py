"""Normalization as the first layer of a network.

As part of the model, it keeps attacks and threat models in [0, 1] pixels, and checkpoints include
the statistics.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Normalize(nn.Module):
    """Subtract each channel's mean and divide by its standard deviation."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std):
            raise ValueError(
                f"mean has {len(mean)} channels and std {len(std)}: give one number per channel"
            )
        if not all(value > 0 for value in std):
            raise ValueError(f"std = {list(std)}: must be above 0 in every channel")
        self.register_buffer("mean", _per_channel(mean))
        self.register_buffer("std", _per_channel(std))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        mean, std = (
            ", ".join(f"{value:.6g}" for value in values.flatten().tolist())
            for values in (self.mean, self.std)
        )
        return f"mean=[{mean}], std=[{std}]"


def _per_channel(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.get_default_dtype()).reshape(-1, 1, 1)


def normalized(net: nn.Module, mean: Sequence[float], std: Sequence[float]) -> nn.Module:
    """`net` on normalized images; its state dict has the keys `normalize.*` and `net.*`."""
    return nn.Sequential(OrderedDict(normalize=Normalize(mean, std), net=net))
