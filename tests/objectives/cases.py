"""A network, images and hand-written losses shared by the objective tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dat.core.threat import ThreatModel
from dat.objectives import Batch

CLASSES = 5
EPS = 0.3


def net() -> nn.Module:
    """Nonlinear in the image and in the weights, in double precision."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    random = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, generator=random)
    return net


def case(n: int = 7, *, norm: str = "linf", eps: float = EPS) -> tuple[Batch, Tensor]:
    """A batch, and perturbed images."""
    random = torch.Generator().manual_seed(1)
    x, noise = torch.rand(2, n, 1, 3, 3, generator=random, dtype=torch.float64)
    batch = Batch.of(x, torch.arange(n) % CLASSES, threat=ThreatModel(norm=norm, eps=eps))
    return batch, (x + eps * (2 * noise - 1)).clamp(0, 1)


def probabilities(logits: Tensor) -> Tensor:
    return logits.exp() / logits.exp().sum(1, keepdim=True)


def of_label(p: Tensor, y: Tensor) -> Tensor:
    """One column of each row."""
    return torch.stack([row[label] for row, label in zip(p, y.tolist(), strict=True)])


def surprise(logits: Tensor, y: Tensor) -> Tensor:
    """-log p(label)."""
    return -of_label(probabilities(logits), y).log()


def kl(clean: Tensor, other: Tensor) -> Tensor:
    """sum of p log(p / q), p from the first logits."""
    p, q = probabilities(clean), probabilities(other)
    return (p * (p / q).log()).sum(1)
