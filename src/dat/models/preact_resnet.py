"""Pre-activation ResNets for small images (He et al., "Identity mappings", ECCV 2016).

These are the variants used in the adversarial-training literature for CIFAR-10: a 3 x 3 stem
without pooling, and no batch norm after the last block.
"""

from __future__ import annotations

from itertools import pairwise
from typing import cast

from torch import Tensor, nn

from dat.models.initialization import initialize
from dat.models.layers import ACTIVATION_FUNCTIONS


class PreActBlock(nn.Module):
    """Two 3 x 3 convolutions, each after batch norm and activation, with a shortcut."""

    expansion = 1

    def __init__(
        self, inputs: int, outputs: int, *, stride: int = 1, activation: str = "relu"
    ) -> None:
        super().__init__()
        self.activation = ACTIVATION_FUNCTIONS[activation]
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut: nn.Conv2d | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = self.activation(self.bn1(x))
        # the projection, if the shape changes, is applied after batch norm and activation
        identity = x if self.shortcut is None else self.shortcut(active)
        return cast(Tensor, identity + self.conv2(self.activation(self.bn2(self.conv1(active)))))


class PreActBottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, each after batch norm and activation, with a
    shortcut."""

    expansion = 4

    def __init__(
        self, inputs: int, outputs: int, *, stride: int = 1, activation: str = "relu"
    ) -> None:
        super().__init__()
        self.activation = ACTIVATION_FUNCTIONS[activation]
        width = outputs // self.expansion
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.shortcut: nn.Conv2d | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = self.activation(self.bn1(x))
        identity = x if self.shortcut is None else self.shortcut(active)
        y = self.conv2(self.activation(self.bn2(self.conv1(active))))
        return cast(Tensor, identity + self.conv3(self.activation(self.bn3(y))))


def preact_stages(
    widths: tuple[int, ...],
    *,
    depths: tuple[int, ...],
    block: type[PreActBlock | PreActBottleneck] = PreActBlock,
    activation: str = "relu",
) -> nn.Sequential:
    """Stages of `depths` blocks with widths `widths[1:]`; each but the first halves the image.

    `widths[0]` is the width of the stem before them.
    """
    stages = nn.Sequential()
    for number, ((inputs, outputs), depth) in enumerate(zip(pairwise(widths), depths, strict=True)):
        first = block(inputs, outputs, stride=1 if number == 0 else 2, activation=activation)
        rest = (block(outputs, outputs, activation=activation) for _ in range(depth - 1))
        stages.append(nn.Sequential(first, *rest))
    return stages


class PreActResNet(nn.Module):
    def __init__(
        self,
        classes: int,
        *,
        channels: int,
        width: int,
        depths: tuple[int, ...] = (2, 2, 2, 2),
        block: type[PreActBlock | PreActBottleneck] = PreActBlock,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        widths = (width, *(block.expansion * width * 2**stage for stage in range(4)))
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.stages = preact_stages(widths, depths=depths, block=block, activation=activation)
        self.linear = nn.Linear(widths[-1], classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        features = self.stages(self.conv(x))
        return cast(Tensor, self.linear(features.mean(dim=(2, 3))))


def preact_resnet18(
    classes: int, *, channels: int = 3, width: int | None = None, activation: str = "relu"
) -> nn.Module:
    """`width` is the number of channels of the first stage, 64 as published."""
    width = 64 if width is None else width
    return PreActResNet(classes, channels=channels, width=width, activation=activation)


def preact_resnet34(
    classes: int, *, channels: int = 3, width: int | None = None, activation: str = "relu"
) -> nn.Module:
    """`width` is the number of channels of the first stage, 64 as published."""
    return PreActResNet(
        classes,
        channels=channels,
        width=64 if width is None else width,
        depths=(3, 4, 6, 3),
        activation=activation,
    )


def preact_resnet50(
    classes: int, *, channels: int = 3, width: int | None = None, activation: str = "relu"
) -> nn.Module:
    """`width` is the number of channels of the stem, 64 as published."""
    return PreActResNet(
        classes,
        channels=channels,
        width=64 if width is None else width,
        depths=(3, 4, 6, 3),
        block=PreActBottleneck,
        activation=activation,
    )
