"""Per-example losses. All take logits of shape (n, classes) and return a tensor of shape (n,)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def cross_entropy(logits: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """-log p(label), with label smoothing as in Szegedy et al. 2016."""
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
