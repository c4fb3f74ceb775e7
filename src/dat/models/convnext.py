"""ConvNeXt (Liu et al., "A ConvNet for the 2020s", CVPR 2022), and the smaller sizes of timm.

Parameters are named as in timm, so that its checkpoints of sizes from tiny on can be loaded. The
convolutional stem is that of the robust models of Singh et al. (NeurIPS 2023).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx, nn

from dat.models.layers import (
    ChannelNorm,
    DropPath,
    StemLayer,
    conv_stem,
    drop_path_rates,
    pad_to_side,
    share,
)

SIZES = {
    "atto": ((2, 2, 6, 2), 40),
    "femto": ((2, 2, 6, 2), 48),
    "pico": ((2, 2, 6, 2), 64),
    "nano": ((2, 2, 8, 2), 80),
    "tiny": ((3, 3, 9, 3), 96),
    "small": ((3, 3, 27, 3), 96),
    "base": ((3, 3, 27, 3), 128),
}
"""Blocks per stage, and the channels of the first stage."""
fx.wrap("pad_to_side")  # a leaf for fx, which cannot trace code that depends on sizes
LAYER_SCALE = 1e-6
"""The initial scale of residual branches."""


class ConvNeXtBlock(nn.Module):
    """A depthwise 7 x 7 convolution, a normalization and an MLP per pixel, scaled and residual."""

    def __init__(self, width: int, *, drop_path_rate: float) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            OrderedDict(
                fc1=nn.Linear(width, 4 * width), act=nn.GELU(), fc2=nn.Linear(4 * width, width)
            )
        )
        self.gamma = nn.Parameter(torch.full((width,), LAYER_SCALE))
        self.drop_path = DropPath(drop_path_rate)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1)))
        y = (y * self.gamma).permute(0, 3, 1, 2)
        return cast(Tensor, x + self.drop_path(y))


class ConvNeXtStage(nn.Module):
    """Blocks of one width; every stage but the first halves the image before them."""

    def __init__(self, inputs: int, width: int, *, rates: list[float]) -> None:
        super().__init__()
        self.downsample: nn.Sequential | None = None
        if inputs != width:
            self.downsample = nn.Sequential(
                ChannelNorm(inputs), nn.Conv2d(inputs, width, 2, stride=2)
            )
        self.blocks = nn.Sequential(*(ConvNeXtBlock(width, drop_path_rate=rate) for rate in rates))

    def forward(self, x: Tensor) -> Tensor:
        if self.downsample is not None:
            x = self.downsample(pad_to_side(x, 2))
        return cast(Tensor, self.blocks(x))


class ConvNeXtHead(nn.Module):
    """Averages the features of all pixels, normalizes and classifies them."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.fc(self.norm(x.mean((2, 3)))))


@dataclass(frozen=True, kw_only=True)
class ConvNeXtSize:
    """Blocks per stage, channels of the first stage, and whether the stem is convolutional."""

    depths: tuple[int, ...]
    width: int
    conv_stem: bool = False
    extra_convolution: bool = False
    """The convolutional stem of the base size has a third convolution, with stride 1."""

    @classmethod
    def named(cls, name: str, *, width: int | None, conv_stem: bool = False) -> ConvNeXtSize:
        """A published size, with another width if it is given."""
        depths, published = SIZES[name]
        return cls(
            depths=depths,
            width=published if width is None else width,
            conv_stem=conv_stem,
            extra_convolution=name == "base",
        )

    def stem(self, channels: int) -> nn.Sequential:
        """Reduces every 4 x 4 pixels to one."""
        if not self.conv_stem:
            return nn.Sequential(
                nn.Conv2d(channels, self.width, 4, stride=4), ChannelNorm(self.width)
            )
        half, last = StemLayer(share(self.width, 1 / 2)), StemLayer(self.width)
        if not self.extra_convolution:
            return conv_stem(channels, (half, last))
        between = StemLayer(share(self.width, 3 / 4))
        return conv_stem(channels, (half, between, last._replace(stride=1)))


class ConvNeXt(nn.Module):
    def __init__(
        self, classes: int, *, channels: int, size: ConvNeXtSize, drop_path_rate: float
    ) -> None:
        super().__init__()
        width = size.width
        self.patch = 1 if size.conv_stem else 4
        self.stem = size.stem(channels)
        rates = iter(drop_path_rates(drop_path_rate, sum(size.depths)))
        widths = [width * 2**stage for stage in range(len(size.depths))]
        self.stages = nn.Sequential(
            *(
                ConvNeXtStage(inputs, outputs, rates=[next(rates) for _ in range(depth)])
                for inputs, outputs, depth in zip(
                    [width, *widths], widths, size.depths, strict=False
                )
            )
        )
        self.head = ConvNeXtHead(widths[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.stages(self.stem(pad_to_side(x, self.patch)))))


def convnext(name: re.Match[str]) -> Callable[..., nn.Module]:
    """The factory of `convnext-SIZE` or `convnext-SIZE-convstem`; its `width` is the channels of
    the first stage."""

    def factory(
        classes: int, *, channels: int = 3, width: int | None = None, drop_path_rate: float = 0.0
    ) -> nn.Module:
        size = ConvNeXtSize.named(name[1], width=width, conv_stem=bool(name[2]))
        return ConvNeXt(classes, channels=channels, size=size, drop_path_rate=drop_path_rate)

    return factory


def convnext_tiny(
    classes: int, *, channels: int = 3, width: int | None = None, drop_path_rate: float = 0.0
) -> nn.Module:
    """`width` is the number of channels of the first stage, 96 as published."""
    size = ConvNeXtSize.named("tiny", width=width)
    return ConvNeXt(classes, channels=channels, size=size, drop_path_rate=drop_path_rate)


def convnext_tiny_convstem(
    classes: int, *, channels: int = 3, width: int | None = None, drop_path_rate: float = 0.0
) -> nn.Module:
    """`width` is the number of channels of the first stage, 96 as published."""
    size = ConvNeXtSize.named("tiny", width=width, conv_stem=True)
    return ConvNeXt(classes, channels=channels, size=size, drop_path_rate=drop_path_rate)
