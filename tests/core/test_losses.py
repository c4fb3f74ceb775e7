"""Per-example losses against the formulas."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from dat.core.losses import (
    NO_LABEL,
    boosted_cross_entropy,
    cross_entropy,
    dlr,
    hard_labels,
    kl_divergence,
    margin,
    soft_labels,
    targeted_dlr,
    targeted_margin,
)


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
    loss = cross_entropy(logits, labels, smoothing=smoothing)
    assert loss.shape == (6,)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_cross_entropy_is_linear_in_soft_labels(smoothing: float) -> None:
    logits, labels = logits_and_labels()
    other = labels.flip(0)
    mixed = 0.3 * soft_labels(labels, 4).double() + 0.7 * soft_labels(other, 4)
    loss = cross_entropy(logits, mixed, smoothing=smoothing)
    parts = [cross_entropy(logits, y, smoothing=smoothing) for y in (labels, other)]
    torch.testing.assert_close(loss, 0.3 * parts[0] + 0.7 * parts[1])
    mean = F.cross_entropy(logits, mixed, label_smoothing=smoothing)
    torch.testing.assert_close(loss.mean(), mean)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_soft_labels_of_unlabelled_examples_cost_nothing(smoothing: float) -> None:
    logits, labels = logits_and_labels()
    labels[2] = NO_LABEL
    soft = soft_labels(labels, 4)
    assert soft.sum(1).tolist() == [1, 1, 0, 1, 1, 1]
    expected = cross_entropy(logits, labels, smoothing=smoothing)
    torch.testing.assert_close(cross_entropy(logits, soft, smoothing=smoothing), expected)
    assert torch.equal(hard_labels(soft), labels) and hard_labels(labels) is labels


def test_hard_labels_are_those_of_the_largest_weight() -> None:
    soft = torch.tensor([[0.2, 0.8, 0.0], [0.6, 0.0, 0.4], [0.0, 0.0, 0.0], [0.0, 0.0, 0.1]])
    assert hard_labels(soft).tolist() == [1, 0, NO_LABEL, 2]


@pytest.mark.parametrize("loss", [margin, dlr, boosted_cross_entropy])
def test_other_losses_refuse_soft_labels(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    logits, labels = logits_and_labels()
    with pytest.raises(ValueError, match="is not defined for soft labels"):
        loss(logits, soft_labels(labels, 4))


def test_cross_entropy_has_the_mean_of_torch() -> None:
    logits, labels = logits_and_labels()
    mean = cross_entropy(logits, labels, smoothing=0.2).mean()
    torch.testing.assert_close(mean, F.cross_entropy(logits, labels, label_smoothing=0.2))


def test_cross_entropy_has_the_gradient_softmax_minus_label() -> None:
    logits, labels = logits_and_labels()
    logits.requires_grad_(True)
    (gradient,) = torch.autograd.grad(cross_entropy(logits, labels).sum(), logits)
    torch.testing.assert_close(gradient, logits.softmax(1) - F.one_hot(labels, 4))


def test_cross_entropy_of_extreme_logits_is_finite() -> None:
    logits = torch.tensor([[1e4, -1e4], [-1e4, 1e4]])
    assert cross_entropy(logits, torch.tensor([0, 0])).tolist() == [0.0, 2e4]


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_cross_entropy_without_a_label_is_zero_and_teaches_nothing(smoothing: float) -> None:
    logits, labels = logits_and_labels()
    partly_labelled = torch.where(torch.arange(6) % 2 == 0, NO_LABEL, labels)
    logits.requires_grad_(True)
    loss = cross_entropy(logits, partly_labelled, smoothing=smoothing)
    assert loss[::2].tolist() == [0, 0, 0]
    torch.testing.assert_close(loss[1::2], cross_entropy(logits, labels, smoothing=smoothing)[1::2])
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert not gradient[::2].any() and gradient[1::2].any(1).all()


def two_predictions(n: int = 8, classes: int = 4, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    p, q = 3 * torch.randn(2, n, classes, generator=random, dtype=torch.float64)
    return p, q


@pytest.mark.parametrize("classes", [2, 4, 10])
def test_divergence_agrees_with_scipy_and_torch(classes: int) -> None:
    clean, other = two_predictions(classes=classes)
    kl = kl_divergence(clean, other)
    assert kl.shape == (8,)
    p, q = clean.softmax(1), other.softmax(1)
    np.testing.assert_allclose(kl, scipy.stats.entropy(p, q, axis=1), rtol=1e-9)
    by_torch = F.kl_div(other.log_softmax(1), p, reduction="none").sum(1)
    torch.testing.assert_close(kl, by_torch)
    # the other way round it is another number
    assert (kl - kl_divergence(other, clean)).abs().min() > 1e-3


def test_divergence_has_the_gradients_of_the_formula() -> None:
    """By q's logits it is q - p; by p's it is p * (log(p / q) - KL)."""
    clean, other = (logits.requires_grad_(True) for logits in two_predictions())
    kl = kl_divergence(clean, other)
    by_clean, by_other = torch.autograd.grad(kl.sum(), (clean, other))
    p, q = clean.softmax(1), other.softmax(1)
    torch.testing.assert_close(by_other, q - p)
    torch.testing.assert_close(by_clean, p * ((p / q).log() - kl.unsqueeze(1)))


@settings(max_examples=100)
@given(
    seed=st.integers(0, 10**6),
    classes=st.integers(2, 12),
    scale=st.sampled_from([1e-6, 1.0, 10.0, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_divergence_is_never_negative(
    seed: int, classes: int, scale: float, dtype: torch.dtype
) -> None:
    clean, other = (scale * z.to(dtype) for z in two_predictions(classes=classes, seed=seed))
    kl = kl_divergence(clean, other)
    assert kl.isfinite().all()
    assert (kl >= -4 * torch.finfo(dtype).eps).all()


@settings(max_examples=50)
@given(
    seed=st.integers(0, 10**6),
    classes=st.integers(2, 12),
    shift=st.floats(-100, 100),
    bump=st.floats(0.01, 10),
)
def test_divergence_is_zero_where_the_predictions_are_equal_and_only_there(
    seed: int, classes: int, shift: float, bump: float
) -> None:
    """A shift of the logits changes no prediction, a higher logit does."""
    clean, _ = two_predictions(classes=classes, seed=seed)
    assert (kl_divergence(clean, clean) == 0).all()
    assert kl_divergence(clean, clean + shift).abs().max() < 1e-12
    other = clean.clone()
    other[:, seed % classes] += bump
    apart = (clean.softmax(1) - other.softmax(1)).abs().sum(1)
    kl = kl_divergence(clean, other)
    assert (kl > 0).all()
    assert (kl >= apart.square() / 2 * (1 - 1e-6)).all()  # Pinsker's inequality


def boosted_of(z: Tensor, label: int) -> Tensor:
    """-log p(label) - log(1 - the largest other p), computed literally."""
    p = z.exp() / z.exp().sum()
    others = torch.cat((p[:label], p[label + 1 :]))
    return -torch.log(p[label]) - torch.log(1 - others.max())


@pytest.mark.parametrize("classes", [2, 3, 4, 10])
def test_boosted_cross_entropy_is_the_formula(classes: int) -> None:
    logits, labels = logits_and_labels(60, classes)
    right = logits.argmax(1) == labels
    assert right.any() and not right.all()
    loss = boosted_cross_entropy(logits, labels)
    assert loss.shape == (60,)
    rows = zip(logits, labels.tolist(), strict=True)
    torch.testing.assert_close(loss, torch.stack([boosted_of(z, label) for z, label in rows]))


def test_boosted_cross_entropy_is_finite_where_the_formula_is_not() -> None:
    """1 - p is 0 once p rounds to 1; the sum of the others never is."""
    logits = torch.tensor([[100.0, 0, 0], [300, 0, 0], [0, 500, 1]], dtype=torch.float64)
    labels = torch.tensor([1, 1, 2])
    naive = [boosted_of(z, label) for z, label in zip(logits, labels.tolist(), strict=True)]
    assert torch.stack(naive).tolist() == [torch.inf] * 3
    loss = boosted_cross_entropy(logits, labels)
    # log p(label) is z - the top; log(1 - p) is the logarithm of what is left
    expected = [200 - np.log(2), 600 - np.log(2), 499 + 500 - np.log(1 + np.e)]
    np.testing.assert_allclose(loss, expected, rtol=1e-12)


@pytest.mark.parametrize("scale", [1e4, 1e10, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_predictions_far_apart_have_finite_losses_and_gradients(
    scale: float, dtype: torch.dtype
) -> None:
    rows = torch.eye(4, dtype=dtype) * scale
    clean, other = rows.repeat(4, 1), rows.repeat_interleave(4, 0)
    labels = torch.arange(4).repeat(4)
    clean.requires_grad_(True), other.requires_grad_(True)
    apart, boosted = kl_divergence(clean, other), boosted_cross_entropy(other, labels)
    same = labels == torch.arange(4).repeat_interleave(4)
    # KL and -log p(label) are one difference of logits, and -log(1 - p) is another
    torch.testing.assert_close(apart, torch.where(same, 0.0, scale).to(dtype))
    torch.testing.assert_close(
        boosted, torch.where(same, 0.0, 2 * scale).to(dtype), rtol=1e-3, atol=1e-3
    )
    for gradient in torch.autograd.grad((apart + boosted).sum(), (clean, other)):
        assert gradient.isfinite().all()


def test_boosted_cross_entropy_of_two_classes_is_twice_the_cross_entropy() -> None:
    """There 1 - p of the other class is p of the label."""
    logits, labels = logits_and_labels(30, 2)
    loss = boosted_cross_entropy(logits, labels)
    torch.testing.assert_close(loss, 2 * cross_entropy(logits, labels))


def test_gradient_of_the_boosted_cross_entropy_is_that_of_the_formula() -> None:
    logits, labels = logits_and_labels(12)
    logits.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda z: boosted_cross_entropy(z, labels), logits)
    assert torch.autograd.gradcheck(
        kl_divergence, (logits, logits.detach().flip(0).requires_grad_())
    )


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
    for actual, expected in (
        (margin(logits, labels), [margin_of(z, y) for z, y, _ in rows]),
        (dlr(logits, labels), [dlr_of(z, y) for z, y, _ in rows]),
        (targeted_margin(logits, labels, targets), [z[t] - z[y] for z, y, t in rows]),
        (targeted_dlr(logits, labels, targets), [targeted_dlr_of(*row) for row in rows]),
    ):
        assert actual.shape == (40,)
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("loss", [margin, dlr])
def test_a_margin_is_positive_for_misclassified_images(loss: Callable[..., Tensor]) -> None:
    logits, labels = logits_and_labels(200)
    assert torch.equal(loss(logits, labels) > 0, logits.argmax(1) != labels)


def test_margin_is_the_highest_lead() -> None:
    logits, labels = logits_and_labels(50)
    others = torch.stack([(labels + k) % 4 for k in (1, 2, 3)])
    leads = torch.stack([targeted_margin(logits, labels, targets) for targets in others])
    torch.testing.assert_close(margin(logits, labels), leads.max(0).values)


def test_dlr_is_between_minus_one_and_one_where_the_label_is_among_the_top_three() -> None:
    logits, labels = logits_and_labels(200, 3)
    loss = dlr(logits, labels)
    assert loss.min() > -1 and loss.max() <= 1 + 1e-9


def test_margins_of_two_classes_need_no_third() -> None:
    logits, labels = torch.tensor([[1.0, 3.0], [1.0, 3.0]]), torch.tensor([0, 1])
    assert margin(logits, labels).tolist() == [2, -2]
    assert targeted_margin(logits, labels, 1 - labels).tolist() == [2, -2]


@settings(max_examples=50)
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
    for actual, expected in (
        (dlr(moved, labels), dlr(logits, labels)),
        (targeted_dlr(moved, labels, targets), targeted_dlr(logits, labels, targets)),
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


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
    """Even where all logits are equal and the scale is 0."""
    logits = torch.tensor(EXTREMES, dtype=dtype, requires_grad=True)
    labels = torch.full((len(EXTREMES),), label)
    targets = (labels + 1) % 4
    for loss in (
        margin(logits, labels),
        dlr(logits, labels),
        targeted_margin(logits, labels, targets),
        targeted_dlr(logits, labels, targets),
    ):
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
        assert loss.isfinite().all() and gradient.isfinite().all()


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
