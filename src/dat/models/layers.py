"""Layers that several networks share: activations, stochastic depth, a convolutional stem."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
}
ACTIVATION_MODULES: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
}


class DropPath(nn.Module):
    """Stochastic depth (Huang et al., "Deep networks with stochastic depth", ECCV 2016): in
    training, sets a residual branch to zero for a random share of the images, and scales it up for
    the others. Random numbers are those of torch's generators, as for dropout."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"drop_path_rate = {rate}: must be at least 0 and below 1")
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        keep = 1 - self.rate
        kept = x.new_empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(keep)
        return x * (kept / keep)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"


def drop_path_rates(last: float, depth: int) -> list[float]:
    """A rate for each block, linearly from 0 to `last`."""
    return [last * block / max(depth - 1, 1) for block in range(depth)]


class ChannelNorm(nn.LayerNorm):
    """Layer normalization over the channels of each pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


NARROWEST = 8
"""Channels inside a stem at least: normalization over fewer leaves little of the image."""


def share(width: int, part: float) -> int:
    """A part of a width, for a layer inside a stem."""
    return max(NARROWEST, math.ceil(width * part))


class StemLayer(NamedTuple):
    """A convolution of a stem."""

    width: int
    stride: int = 2


def conv_stem(
    channels: int, layers: Sequence[StemLayer], *, out: int | None = None
) -> nn.Sequential:
    """The convolutional stem of robust ConvNeXts and ViTs (Singh et al., "Revisiting adversarial
    training for ImageNet", NeurIPS 2023): 3 x 3 convolutions, each with a normalization and a GELU;
    with `out`, a 1 x 1 convolution to that width."""
    stem, inputs = nn.Sequential(), channels
    for width, stride in layers:
        stem.append(nn.Conv2d(inputs, width, 3, stride=stride, padding=1))
        stem.append(ChannelNorm(width))
        stem.append(nn.GELU())
        inputs = width
    if out is not None:
        stem.append(nn.Conv2d(inputs, out, 1))
    return stem


def pad_to_side(x: Tensor, side: int) -> Tensor:
    """Pad images that are smaller than `side` x `side` with zeros. A module that calls this calls
    `fx.wrap("pad_to_side")` too."""
    below, right = (max(side - length, 0) for length in x.shape[-2:])
    return F.pad(x, (0, right, 0, below)) if below or right else x
