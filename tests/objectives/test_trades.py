"""TRADES against the formula of Zhang et al. 2019."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from dat.attacks import PGD, AttackTarget
from dat.core.losses import NO_LABEL
from dat.core.settings import SettingError
from dat.core.threat import ThreatModel
from dat.objectives import TRADES, Batch
from tests.objectives.cases import CLASSES, case, kl, net, surprise

betas = pytest.mark.parametrize("beta", [0.0, 1.0, 6.0])


@betas
def test_loss_is_the_clean_loss_and_beta_times_the_kl(beta: float) -> None:
    model, (batch, x_adv) = net(), case()
    clean, adversarial = model(batch.x), model(x_adv)
    expected = surprise(clean, batch.y) + beta * kl(clean, adversarial)
    outcome = TRADES(beta=beta).loss(model, batch, x_adv)
    torch.testing.assert_close(outcome.loss, expected)
    torch.testing.assert_close(outcome.logits, adversarial)


@betas
def test_it_equals_the_loss_in_torch(beta: float) -> None:
    """The authors' code: the mean over the batch, with the clean prediction as kl_div's target."""
    model, (batch, x_adv) = net(), case()
    clean, adversarial = model(batch.x), model(x_adv)
    apart = F.kl_div(adversarial.log_softmax(1), clean.softmax(1), reduction="batchmean")
    expected = F.cross_entropy(clean, batch.y, label_smoothing=0.3) + beta * apart
    loss = TRADES(beta=beta, label_smoothing=0.3).loss(model, batch, x_adv).loss
    torch.testing.assert_close(loss.mean(), expected)


def test_phi_is_the_kl_from_the_clean_prediction() -> None:
    model, (batch, x_adv) = net(), case()
    phi = TRADES(beta=3, label_smoothing=0.5).phi(model, batch)
    torch.testing.assert_close(phi(x_adv), kl(model(batch.x), model(x_adv)))
    assert isinstance(phi, AttackTarget)
    wrong = model(x_adv).argmax(1) != batch.y
    assert wrong.any() and not wrong.all()
    assert torch.equal(phi.forward(x_adv)[1], wrong)


def test_phi_is_flat_at_the_image_so_an_attack_needs_a_random_start() -> None:
    model, (batch, _) = net(), case()
    phi, threat = TRADES().phi(model, batch), ThreatModel(norm="l2", eps=0.3)
    x = batch.x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(phi(x).sum(), x)
    assert phi(x).abs().max() < 1e-12 and gradient.abs().max() < 1e-12
    started = PGD(steps=5)(phi, batch.x, threat)
    assert (phi(started) > 1e-3).all()


def test_both_predictions_learn() -> None:
    """The gradient of the KL also reaches the clean prediction: it is not detached."""
    model, (batch, x_adv) = net(), case()
    parameters = list(model.parameters())
    clean, adversarial = model(batch.x), model(x_adv)
    ours, full, half = (
        torch.autograd.grad(loss.sum(), parameters, retain_graph=True)
        for loss in (
            TRADES(beta=2).loss(model, batch, x_adv).loss,
            surprise(clean, batch.y) + 2 * kl(clean, adversarial),
            surprise(clean, batch.y) + 2 * kl(clean.detach(), adversarial),
        )
    )
    for actual, expected, other in zip(ours, full, half, strict=True):
        torch.testing.assert_close(actual, expected)
        assert (actual - other).abs().max() > 1e-3


@betas
@pytest.mark.parametrize("smoothing", [0.0, 0.4])
def test_without_a_perturbation_it_is_the_cross_entropy(beta: float, smoothing: float) -> None:
    model, (batch, _) = net(), case(eps=0)
    objective = TRADES(beta=beta, label_smoothing=smoothing)
    x_adv = PGD(steps=2)(objective.phi(model, batch), batch.x, batch.threat)
    expected = F.cross_entropy(model(batch.x), batch.y, reduction="none", label_smoothing=smoothing)
    torch.testing.assert_close(objective.loss(model, batch, x_adv).loss, expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.4])
def test_without_a_label_it_is_the_kl_alone(smoothing: float) -> None:
    model, (batch, x_adv) = net(), case()
    y = torch.where(torch.arange(7) % 2 == 0, NO_LABEL, batch.y)
    partly_labelled = Batch.of(batch.x, y, threat=batch.threat)
    objective = TRADES(beta=2, label_smoothing=smoothing)
    losses = objective.loss(model, partly_labelled, x_adv).loss
    torch.testing.assert_close(losses[::2], 2 * kl(model(batch.x), model(x_adv))[::2])
    torch.testing.assert_close(losses[1::2], objective.loss(model, batch, x_adv).loss[1::2])
    phi, fully_labelled = (
        objective.phi(model, labelled_as)(x_adv) for labelled_as in (partly_labelled, batch)
    )
    torch.testing.assert_close(phi, fully_labelled)
    gradients = torch.autograd.grad(losses.sum(), list(model.parameters()))
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)
    objective.check_labels()


def test_the_label_is_never_attacked() -> None:
    """phi holds the labels, for attacks that need them, but does not depend on them."""
    model, (batch, x_adv) = net(), case()
    other = Batch.of(batch.x, (batch.y + 1) % CLASSES, threat=batch.threat)
    first, second = (TRADES().phi(model, labelled_as)(x_adv) for labelled_as in (batch, other))
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("beta", -1, "TRADES.beta = -1: must be at least 0"),
        ("label_smoothing", 1, "label_smoothing = 1: must be at least 0 and below 1"),
    ],
)
def test_impossible_settings_are_refused(name: str, value: float, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        TRADES(**{name: value})
