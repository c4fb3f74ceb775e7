"""ResNet-18, -34 and -50 v1.5 (He et al., "Deep residual learning", CVPR 2016).

Version 1.5 has the stride at the 3 x 3 convolution of a bottleneck, not at the first 1 x 1.
Parameters are named as in torchvision, so that its checkpoints can be loaded.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn.functional import relu

from dat.models.initialization import initialize


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions, each followed by a batch norm, with a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _projection(inputs, width, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        y = relu(self.bn1(self.conv1(x)))
        return relu(identity + self.bn2(self.conv2(y)))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, each followed by a batch norm, with a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, *, stride: int = 1) -> None:
        super().__init__()
        outputs = self.expansion * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = _projection(inputs, outputs, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        y = relu(self.bn1(self.conv1(x)))
        y = relu(self.bn2(self.conv2(y)))
        return relu(identity + self.bn3(self.conv3(y)))


def _projection(inputs: int, outputs: int, *, stride: int) -> nn.Sequential | None:
    """The shortcut where the shape changes."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
    )


Block = type[BasicBlock | Bottleneck]


class ResNet(nn.Module):
    def __init__(
        self, classes: int, *, channels: int, width: int, block: Block, depths: tuple[int, ...]
    ) -> None:
        super().__init__()
        expansion = block.expansion
        self.conv1 = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(block, width, width, depth=depths[0])
        self.layer2 = _stage(block, expansion * width, 2 * width, depth=depths[1], stride=2)
        self.layer3 = _stage(block, expansion * 2 * width, 4 * width, depth=depths[2], stride=2)
        self.layer4 = _stage(block, expansion * 4 * width, 8 * width, depth=depths[3], stride=2)
        self.fc = nn.Linear(expansion * 8 * width, classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.maxpool(relu(self.bn1(self.conv1(x))))
        y = self.layer4(self.layer3(self.layer2(self.layer1(y))))
        return cast(Tensor, self.fc(y.mean(dim=(2, 3))))


def _stage(block: Block, inputs: int, width: int, *, depth: int, stride: int = 1) -> nn.Sequential:
    rest = (block(block.expansion * width, width) for _ in range(depth - 1))
    return nn.Sequential(block(inputs, width, stride=stride), *rest)


def resnet18(classes: int, *, channels: int = 3, width: int | None = None) -> nn.Module:
    """`width` is the number of channels of the stem, 64 as published."""
    width, depths = 64 if width is None else width, (2, 2, 2, 2)
    return ResNet(classes, channels=channels, width=width, block=BasicBlock, depths=depths)


def resnet34(classes: int, *, channels: int = 3, width: int | None = None) -> nn.Module:
    """`width` is the number of channels of the stem, 64 as published."""
    width, depths = 64 if width is None else width, (3, 4, 6, 3)
    return ResNet(classes, channels=channels, width=width, block=BasicBlock, depths=depths)


def resnet50(classes: int, *, channels: int = 3, width: int | None = None) -> nn.Module:
    """`width` is the number of channels of the stem, 64 as published."""
    width, depths = 64 if width is None else width, (3, 4, 6, 3)
    return ResNet(classes, channels=channels, width=width, block=Bottleneck, depths=depths)
