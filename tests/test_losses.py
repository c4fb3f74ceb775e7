"""Per-example losses against the formulas."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from dat.losses import cross_entropy, dlr, lead, margin, targeted_dlr


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


def margin_of(z: list[float], label: int) -> float:
    return max(value for k, value in enumerate(z) if k != label) - z[label]


def dlr_of(z: list[float], label: int) -> float:
    """Equation 6 of Croce & Hein 2020."""
    first, _, third, *_ = sorted(z, reverse=True)
    return -(z[label] - max(v for k, v in enumerate(z) if k != label)) / (first - third)


def targeted_dlr_of(z: list[float], label: int, target: int) -> float:
    """Equation 7 of Croce & Hein 2020."""
    first, _, third, fourth, *_ = sorted(z, reverse=True)
    return -(z[label] - z[target]) / (first - (third + fourth) / 2)


def targets_of(labels: Tensor, classes: int) -> Tensor:
    return (labels + 1 + torch.arange(len(labels)) % (classes - 1)) % classes


@pytest.mark.parametrize("classes", [4, 5, 10])
def test_margins_are_the_formulas(classes: int) -> None:
    logits, labels = logits_and_labels(40, classes)
    targets = targets_of(labels, classes)
    assert (targets != labels).all()
    rows = list(zip(logits.tolist(), labels.tolist(), targets.tolist(), strict=True))
    for found, expected in (
        (margin(logits, labels), [margin_of(z, y) for z, y, _ in rows]),
        (dlr(logits, labels), [dlr_of(z, y) for z, y, _ in rows]),
        (lead(logits, labels, targets), [z[t] - z[y] for z, y, t in rows]),
        (targeted_dlr(logits, labels, targets), [targeted_dlr_of(*row) for row in rows]),
    ):
        assert found.shape == (40,)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("loss", [margin, dlr])
def test_a_margin_is_above_zero_where_the_answer_is_wrong(loss: Callable[..., Tensor]) -> None:
    logits, labels = logits_and_labels(200)
    assert torch.equal(loss(logits, labels) > 0, logits.argmax(1) != labels)


def test_margin_is_the_highest_lead() -> None:
    logits, labels = logits_and_labels(50)
    others = torch.stack([(labels + k) % 4 for k in (1, 2, 3)])
    leads = torch.stack([lead(logits, labels, targets) for targets in others])
    torch.testing.assert_close(margin(logits, labels), leads.max(0).values)


def test_dlr_is_between_minus_one_and_one_where_the_label_is_among_the_top_three() -> None:
    logits, labels = logits_and_labels(200, 3)
    found = dlr(logits, labels)
    assert found.min() > -1 and found.max() <= 1 + 1e-9


def test_margins_of_two_classes_need_no_third() -> None:
    logits, labels = torch.tensor([[1.0, 3.0], [1.0, 3.0]]), torch.tensor([0, 1])
    assert margin(logits, labels).tolist() == [2, -2]
    assert lead(logits, labels, 1 - labels).tolist() == [2, -2]


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 10**6),
    shift=st.floats(-100, 100),
    scale=st.floats(1e-3, 1e3),
    classes=st.integers(4, 12),
)
def test_dlr_ignores_shift_and_scale_of_the_logits(
    seed: int, shift: float, scale: float, classes: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, classes, generator=random, dtype=torch.float64)
    labels = torch.randint(classes, (5,), generator=random)
    targets, moved = targets_of(labels, classes), scale * logits + shift
    for found, expected in (
        (dlr(moved, labels), dlr(logits, labels)),
        (targeted_dlr(moved, labels, targets), targeted_dlr(logits, labels, targets)),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


EXTREMES = [
    [0.0, 0.0, 0.0, 0.0],
    [1e4, 1e4, 1e4, 1e4],
    [1e4, -1e4, -1e4, -1e4],
    [-1e4, 1e4, 1e4, 1e4],
    [1e-30, 0.0, 0.0, 0.0],
    [3.0, 3.0, 1.0, 0.0],
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("label", [0, 1, 3])
def test_gradients_of_margins_are_finite(dtype: torch.dtype, label: int) -> None:
    """Even where all logits are alike, and the scale is 0."""
    logits = torch.tensor(EXTREMES, dtype=dtype, requires_grad=True)
    labels = torch.full((len(EXTREMES),), label)
    targets = (labels + 1) % 4
    for found in (
        margin(logits, labels),
        dlr(logits, labels),
        lead(logits, labels, targets),
        targeted_dlr(logits, labels, targets),
    ):
        (gradient,) = torch.autograd.grad(found.sum(), logits)
        assert found.isfinite().all() and gradient.isfinite().all()


def test_gradient_of_the_margin_is_plus_one_and_minus_one() -> None:
    logits, labels = logits_and_labels()
    logits.requires_grad_(True)
    (gradient,) = torch.autograd.grad(margin(logits, labels).sum(), logits)
    rivals = logits.detach().scatter(1, labels.unsqueeze(1), float("-inf")).argmax(1)
    torch.testing.assert_close(gradient, (F.one_hot(rivals, 4) - F.one_hot(labels, 4)).double())


def test_gradient_of_dlr_is_that_of_the_formula() -> None:
    logits, labels = logits_and_labels()
    targets = targets_of(labels, 4)
    logits.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda z: dlr(z, labels), logits)
    assert torch.autograd.gradcheck(lambda z: targeted_dlr(z, labels, targets), logits)
