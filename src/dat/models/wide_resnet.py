"""WideResNets (Zagoruyko and Komodakis, "Wide residual networks", BMVC 2016), no dropout."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import cast

from torch import Tensor, nn

from dat.models.initialization import initialize
from dat.models.layers import ACTIVATION_FUNCTIONS
from dat.models.preact_resnet import preact_stages

STEM = 16


class WideResNet(nn.Module):
    """Three stages of pre-activation blocks, `widen` times as wide as in a plain ResNet."""

    def __init__(
        self, classes: int, *, channels: int, depth: int, widen: int, activation: str = "relu"
    ) -> None:
        super().__init__()
        widths = (STEM, STEM * widen, 2 * STEM * widen, 4 * STEM * widen)
        self.activation = ACTIVATION_FUNCTIONS[activation]
        self.conv = nn.Conv2d(channels, STEM, 3, padding=1, bias=False)
        # depth counts the stem, the three projection shortcuts and two convolutions per block
        self.stages = preact_stages(widths, depths=((depth - 4) // 6,) * 3, activation=activation)
        self.bn = nn.BatchNorm2d(widths[-1])
        self.linear = nn.Linear(widths[-1], classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        features = self.activation(self.bn(self.stages(self.conv(x))))
        return cast(Tensor, self.linear(features.mean(dim=(2, 3))))


def wrn_28_10(
    classes: int, *, channels: int = 3, width: int | None = None, activation: str = "relu"
) -> nn.Module:
    """`width` is the widen factor, 10 as published; the stem keeps its 16 channels."""
    widen = 10 if width is None else width
    return WideResNet(classes, channels=channels, depth=28, widen=widen, activation=activation)


def wide_resnet(name: re.Match[str]) -> Callable[..., nn.Module]:
    """The factory of `wrn-DEPTH-WIDTH`; its `width` overrides the widen factor."""
    depth, widen = int(name[1]), int(name[2])
    if depth < 10 or depth % 6 != 4 or widen < 1:
        raise ValueError(
            f"model.name = {name[0]!r}: must be wrn-DEPTH-WIDTH, with a depth of 6 n + 4 such as "
            "28, 34 or 70, and a width of at least 1"
        )

    def factory(
        classes: int, *, channels: int = 3, width: int | None = None, activation: str = "relu"
    ) -> nn.Module:
        factor = widen if width is None else width
        return WideResNet(
            classes, channels=channels, depth=depth, widen=factor, activation=activation
        )

    return factory
