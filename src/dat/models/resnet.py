"""ResNet-50 v1.5 (He et al., "Deep residual learning", CVPR 2016).

Version 1.5 has the stride at the 3 x 3 convolution of a bottleneck, not at the first 1 x 1.
Parameters are named as in torchvision, so that its checkpoints can be loaded.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn.functional import relu

from dat.models.initialization import initialize

EXPANSION = 4


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, each followed by a batch norm, with a shortcut."""

    def __init__(self, inputs: int, width: int, *, stride: int = 1) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        y = relu(self.bn1(self.conv1(x)))
        y = relu(self.bn2(self.conv2(y)))
        return relu(identity + self.bn3(self.conv3(y)))


class ResNet(nn.Module):
    def __init__(self, classes: int, *, channels: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(width, width, depth=3)
        self.layer2 = _stage(EXPANSION * width, 2 * width, depth=4, stride=2)
        self.layer3 = _stage(EXPANSION * 2 * width, 4 * width, depth=6, stride=2)
        self.layer4 = _stage(EXPANSION * 4 * width, 8 * width, depth=3, stride=2)
        self.fc = nn.Linear(EXPANSION * 8 * width, classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.maxpool(relu(self.bn1(self.conv1(x))))
        y = self.layer4(self.layer3(self.layer2(self.layer1(y))))
        return cast(Tensor, self.fc(y.mean(dim=(2, 3))))


def _stage(inputs: int, width: int, *, depth: int, stride: int = 1) -> nn.Sequential:
    rest = (Bottleneck(EXPANSION * width, width) for _ in range(depth - 1))
    return nn.Sequential(Bottleneck(inputs, width, stride=stride), *rest)


def resnet50(classes: int, *, channels: int = 3, width: int | None = None) -> nn.Module:
    """`width` is the number of channels of the stem, 64 as published."""
    return ResNet(classes, channels=channels, width=64 if width is None else width)
