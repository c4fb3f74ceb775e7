"""A network of your own. Its inputs are normalized images."""

from __future__ import annotations

from torch import Tensor, nn


class Net(nn.Module):
    """Called with the number of classes and, because it has the parameter, of image channels."""

    def __init__(self, classes: int, channels: int = 1) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
        )
        self.head = nn.Linear(64 * 4 * 4, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits, without a softmax, which would mask gradients from attacks."""
        logits: Tensor = self.head(self.features(x).flatten(1))
        return logits
