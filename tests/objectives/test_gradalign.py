"""GradAlign against the formula of Andriushchenko & Flammarion 2020."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dat.attacks import PGD
from dat.core.rng import Streams
from dat.core.settings import SettingError
from dat.core.threat import ThreatModel
from dat.objectives import Batch, GradAlign
from tests.objectives.cases import CLASSES, case, net, surprise

both_norms = pytest.mark.parametrize("norm", ["linf", "l2"])


def gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The gradient with respect to the input, image by image."""
    rows = []
    for image, label in zip(x, y.tolist(), strict=True):
        at = image.clone().requires_grad_(True)
        loss = -model(at.unsqueeze(0)).log_softmax(1)[0, label]
        rows.append(torch.autograd.grad(loss, at, create_graph=True)[0].flatten())
    return torch.stack(rows)


def apart(model: nn.Module, x: Tensor, other: Tensor, y: Tensor) -> Tensor:
    """1 - a . b / (|a| |b|), from two separate gradients."""
    a, b = gradient(model, x, y), gradient(model, other, y)
    return 1 - (a * b).sum(1) / ((a * a).sum(1).sqrt() * (b * b).sum(1).sqrt())


def neighbor(batch: Batch) -> Tensor:
    """The random point of the ball, from its own stream."""
    draws = Streams.of(0, "objective", index=torch.arange(len(batch.x))).fork("align")
    return batch.threat.random_start(batch.x, draws)


@both_norms
@pytest.mark.parametrize("weight", [0.0, 0.2, 2.0])
def test_loss_is_the_cross_entropy_and_one_minus_the_cosine(norm: str, weight: float) -> None:
    model, (batch, x_adv) = net(), case(norm=norm)
    expected = surprise(model(x_adv), batch.y)
    expected = expected + weight * apart(model, batch.x, neighbor(batch), batch.y)
    outcome = GradAlign(align_weight=weight).loss(model, batch, x_adv)
    torch.testing.assert_close(outcome.loss, expected)
    torch.testing.assert_close(outcome.logits, model(x_adv))


@both_norms
def test_its_gradient_goes_through_both_gradients(norm: str) -> None:
    model, (batch, x_adv) = net(), case(norm=norm)
    by_hand = surprise(model(x_adv), batch.y)
    by_hand = by_hand + 3 * apart(model, batch.x, neighbor(batch), batch.y)
    loss = GradAlign(align_weight=3).loss(model, batch, x_adv).loss
    plain = surprise(model(x_adv), batch.y)
    parameters = list(model.parameters())
    actual, expected, without = (
        torch.autograd.grad(losses.sum(), parameters) for losses in (loss, by_hand, plain)
    )
    for ours, theirs, other in zip(actual, expected, without, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert (ours - other).abs().max() > 1e-3


@both_norms
def test_the_random_point_is_in_the_ball_of_the_batch(norm: str) -> None:
    """And it differs between steps."""
    (batch, x_adv), seen = case(norm=norm, eps=0.3), list[Tensor]()
    model = net()

    def recorded(x: Tensor) -> Tensor:
        seen.append(x.detach().clone())
        logits: Tensor = model(x)
        return logits

    for seed in (0, 1):
        reseeded = Batch.of(batch.x, batch.y, threat=batch.threat, seed=seed)
        GradAlign().loss(recorded, reseeded, x_adv)
    first, second = ((x[:7], x[7:14], x[14:]) for x in seen)
    assert torch.equal(first[0], batch.x) and torch.equal(first[2], x_adv)
    sizes = batch.threat.size(first[1], batch.x)
    assert (sizes <= 0.3 + 1e-12).all() and sizes.max() > 0.25
    assert (first[1] - second[1]).flatten(1).abs().amax(1).min() > 0.01


def test_phi_is_the_plain_cross_entropy() -> None:
    model, (batch, x_adv) = net(), case()
    phi = GradAlign(align_weight=3).phi(model, batch)
    torch.testing.assert_close(phi(x_adv), surprise(model(x_adv), batch.y))


@pytest.mark.parametrize("weight", [0.2, 100.0])
def test_without_a_perturbation_it_is_the_cross_entropy(weight: float) -> None:
    model, (batch, _) = net(), case(eps=0)
    objective = GradAlign(align_weight=weight)
    x_adv = PGD(steps=2)(objective.phi(model, batch), batch.x, batch.threat)
    expected = surprise(model(batch.x), batch.y)
    torch.testing.assert_close(objective.loss(model, batch, x_adv).loss, expected)


def test_a_linear_network_with_two_classes_is_aligned_everywhere() -> None:
    """The gradient then has the same direction at every image."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 2)).double()
    batch, x_adv = case(eps=0.5)
    batch = Batch.of(batch.x, batch.y % 2, threat=batch.threat)
    loss = GradAlign(align_weight=100).loss(model, batch, x_adv).loss
    torch.testing.assert_close(loss, surprise(model(x_adv), batch.y))


def test_a_curved_network_is_less_aligned_the_larger_the_ball() -> None:
    model, misalignments = net(), []
    for eps in (0.01, 0.1, 0.5):
        batch, _ = case(eps=eps)
        with_it, without = (
            GradAlign(align_weight=weight).loss(model, batch, batch.x).loss.sum().item()
            for weight in (1.0, 0.0)
        )
        misalignments.append(with_it - without)
    assert 0 < 5 * misalignments[0] < misalignments[1] and 2 * misalignments[1] < misalignments[2]


@pytest.mark.parametrize("confidence", [20.0, 30.0])
def test_the_cosine_of_a_confident_image_is_that_of_its_tiny_gradients(confidence: float) -> None:
    """Their norm is 1e-13 here: clamping it from below would make the cosine 0."""
    model, (batch, x_adv) = net(), case()
    y = torch.zeros_like(batch.y)
    head = model.get_submodule("3")
    assert isinstance(head, nn.Linear)
    with torch.no_grad():
        head.bias[0] += confidence
    batch = Batch.of(batch.x, y, threat=batch.threat)
    loss = GradAlign(align_weight=1).loss(model, batch, x_adv).loss - surprise(model(x_adv), y)
    expected = apart(model, batch.x, neighbor(batch), y)
    assert expected.max() < 0.5
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)


def test_where_a_gradient_vanishes_there_is_nothing_to_align() -> None:
    """As in the authors' code, which skips such images."""

    def flat(x: Tensor) -> Tensor:
        """Certainly class 0 where the first pixel is dark; otherwise it depends on the image."""
        z = (x.flatten(1).square() @ weight.T).clone()
        return torch.where(x[:, 0, 0, :1] < 0.5, 1e4 * F.one_hot(torch.tensor(0), CLASSES), z)

    weight = torch.randn(
        CLASSES, 9, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    ).requires_grad_(True)
    batch, _ = case()
    x = batch.x.clone()
    x[:, 0, 0, 0] = torch.tensor([0.2, 0.8, 0.2, 0.8, 0.2, 0.8, 0.2])
    batch = Batch.of(x, torch.zeros_like(batch.y), threat=ThreatModel(eps=0.1))
    loss = GradAlign(align_weight=1).loss(flat, batch, x).loss
    aside = loss - F.cross_entropy(flat(x), batch.y, reduction="none")
    assert torch.equal(aside[::2], torch.zeros(4, dtype=torch.float64))
    assert (aside[1::2] > 1e-6).all()
    (gradient,) = torch.autograd.grad(loss.sum(), weight)
    assert gradient.isfinite().all() and gradient.any()


def test_it_works_without_gradients_around_it() -> None:
    model, (batch, x_adv) = net(), case()
    with torch.no_grad():
        loss = GradAlign().loss(model, batch, x_adv).loss
    torch.testing.assert_close(loss, GradAlign().loss(model, batch, x_adv).loss)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(SettingError, match=r"GradAlign\.align_weight = -1: must be at least 0"):
        GradAlign(align_weight=-1)
