"""Pre-activation ResNet-18 for small images (He et al., "Identity mappings", ECCV 2016).

This is the variant used in the adversarial-training literature for CIFAR-10: a 3 x 3 stem without
pooling, and no batch norm after the last block.
"""

from __future__ import annotations

from itertools import pairwise
from typing import cast

from torch import Tensor, nn
from torch.nn.functional import relu

from dat.models.initialization import initialize


class PreActBlock(nn.Module):
    """Two 3 x 3 convolutions, each after batch norm and ReLU, with a shortcut."""

    def __init__(self, inputs: int, outputs: int, *, stride: int = 1) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut: nn.Conv2d | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = relu(self.bn1(x))
        # the projection, if the shape changes, is applied after batch norm and ReLU
        identity = x if self.shortcut is None else self.shortcut(active)
        return cast(Tensor, identity + self.conv2(relu(self.bn2(self.conv1(active)))))


def preact_stages(widths: tuple[int, ...], *, depth: int) -> nn.Sequential:
    """Stages of `depth` blocks with widths `widths[1:]`; each but the first halves the image.

    `widths[0]` is the width of the stem before them.
    """
    stages = nn.Sequential()
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        first = PreActBlock(inputs, outputs, stride=1 if number == 0 else 2)
        rest = (PreActBlock(outputs, outputs) for _ in range(depth - 1))
        stages.append(nn.Sequential(first, *rest))
    return stages


class PreActResNet(nn.Module):
    def __init__(self, classes: int, *, channels: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.stages = preact_stages((width, width, 2 * width, 4 * width, 8 * width), depth=2)
        self.linear = nn.Linear(8 * width, classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        features = self.stages(self.conv(x))
        return cast(Tensor, self.linear(features.mean(dim=(2, 3))))


def preact_resnet18(classes: int, *, channels: int = 3, width: int | None = None) -> nn.Module:
    """`width` is the number of channels of the first stage, 64 as published."""
    return PreActResNet(classes, channels=channels, width=64 if width is None else width)
