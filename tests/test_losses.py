"""Per-example losses against the formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dat.losses import cross_entropy


def logits_and_labels(n: int = 6, classes: int = 4) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(n, classes, generator=random, dtype=torch.float64)
    return logits, torch.randint(classes, (n,), generator=random)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_cross_entropy_is_the_formula(smoothing: float) -> None:
    logits, labels = logits_and_labels()
    log_p = logits - logits.exp().sum(1, keepdim=True).log()
    target = torch.full_like(logits, smoothing / 4)
    target[torch.arange(6), labels] += 1 - smoothing
    expected = -(target * log_p).sum(1)
    found = cross_entropy(logits, labels, smoothing=smoothing)
    assert found.shape == (6,)
    torch.testing.assert_close(found, expected)


def test_cross_entropy_has_the_mean_of_torch() -> None:
    logits, labels = logits_and_labels()
    found = cross_entropy(logits, labels, smoothing=0.2).mean()
    torch.testing.assert_close(found, F.cross_entropy(logits, labels, label_smoothing=0.2))


def test_cross_entropy_has_the_gradient_softmax_minus_label() -> None:
    logits, labels = logits_and_labels()
    logits.requires_grad_(True)
    (gradient,) = torch.autograd.grad(cross_entropy(logits, labels).sum(), logits)
    torch.testing.assert_close(gradient, logits.softmax(1) - F.one_hot(labels, 4))


def test_cross_entropy_of_extreme_logits_is_finite() -> None:
    logits = torch.tensor([[1e4, -1e4], [-1e4, 1e4]])
    assert cross_entropy(logits, torch.tensor([0, 0])).tolist() == [0.0, 2e4]
