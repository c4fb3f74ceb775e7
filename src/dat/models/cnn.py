"""Small CNNs without batch norm.

Batch statistics depend on which samples share a worker, so only networks without them give the same
result for any number of workers.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, fx, nn
from torch.nn import functional as F

from dat.models.initialization import initialize
from dat.models.layers import ACTIVATION_MODULES

GRID = 4
"""The side of the head's feature map: digits differ in the position of their strokes."""


class CNN(nn.Module):
    """Two convolutions, the second with stride 2, and a hidden layer on a 4 x 4 grid of features.

    An 8 x 8 digit reaches the grid unpooled; larger images are averaged down to it.
    """

    def __init__(
        self, classes: int, *, channels: int, width: int, activation: str = "relu"
    ) -> None:
        super().__init__()
        act = ACTIVATION_MODULES[activation]
        self.features = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            act(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            act(),
            nn.AdaptiveAvgPool2d(GRID),
            nn.Flatten(),
        )
        self.head = nn.Sequential(
            nn.Linear(2 * width * GRID**2, 8 * width),
            act(),
            nn.Linear(8 * width, classes),
        )
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.features(x)))


def small_cnn(
    classes: int, *, channels: int = 3, width: int | None = None, activation: str = "relu"
) -> nn.Module:
    """`width` is the number of channels of the first convolution, by default 32."""
    width = 32 if width is None else width
    return CNN(classes, channels=channels, width=width, activation=activation)


MNIST_GRID = 7


@fx.wrap
def to_grid(x: Tensor, side: int) -> Tensor:
    """Adaptive average pooling to `side` x `side`; does nothing, also when traced, at that size."""
    return x if x.shape[-2:] == (side, side) else F.adaptive_avg_pool2d(x, side)


class Grid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return to_grid(x, MNIST_GRID)


class MNISTCNN(nn.Module):
    """Two 4 x 4 convolutions with stride 2 and a hidden layer of 100, the standard network for
    defences on MNIST since Wong & Kolter (2018). Images that are not 28 x 28 are pooled to its
    7 x 7 grid."""

    def __init__(
        self, classes: int, *, channels: int, width: int, activation: str = "relu"
    ) -> None:
        super().__init__()
        act = ACTIVATION_MODULES[activation]
        self.features = nn.Sequential(
            nn.Conv2d(channels, width, 4, stride=2, padding=1),
            act(),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
            act(),
            Grid(),
            nn.Flatten(),
        )
        self.head = nn.Sequential(
            nn.Linear(2 * width * MNIST_GRID**2, 100), act(), nn.Linear(100, classes)
        )
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.features(x)))


def mnist_cnn(
    classes: int, *, channels: int = 3, width: int | None = None, activation: str = "relu"
) -> nn.Module:
    """`width` is the number of channels of the first convolution, 16 as published."""
    width = 16 if width is None else width
    return MNISTCNN(classes, channels=channels, width=width, activation=activation)
