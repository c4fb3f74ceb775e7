"""Weight initialization, shared by the convolutional networks."""

from __future__ import annotations

from torch import nn


def initialize(net: nn.Module) -> None:
    """Initialize convolutions as in He et al. 2015, with the fan-out of the ResNet and WideResNet
    papers.

    Batch norms start as the identity; linear layers keep torch's default, as in torchvision.
    """
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
