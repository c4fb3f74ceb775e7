"""WideResNet-28-10 (Zagoruyko and Komodakis, "Wide residual networks", BMVC 2016), no dropout."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn.functional import relu

from dat.models.initialization import initialize
from dat.models.preact_resnet import preact_stages

STEM = 16


class WideResNet(nn.Module):
    """Three stages of pre-activation blocks, `widen` times as wide as in a plain ResNet."""

    def __init__(self, classes: int, *, channels: int, depth: int, widen: int) -> None:
        super().__init__()
        widths = (STEM, STEM * widen, 2 * STEM * widen, 4 * STEM * widen)
        self.conv = nn.Conv2d(channels, STEM, 3, padding=1, bias=False)
        # depth counts the stem, the three projection shortcuts and two convolutions per block
        self.stages = preact_stages(widths, depth=(depth - 4) // 6)
        self.bn = nn.BatchNorm2d(widths[-1])
        self.linear = nn.Linear(widths[-1], classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        features = relu(self.bn(self.stages(self.conv(x))))
        return cast(Tensor, self.linear(features.mean(dim=(2, 3))))


def wrn_28_10(classes: int, *, channels: int = 3, width: int | None = None) -> nn.Module:
    """`width` is the widen factor, 10 as published; the stem keeps its 16 channels."""
    return WideResNet(classes, channels=channels, depth=28, widen=10 if width is None else width)
