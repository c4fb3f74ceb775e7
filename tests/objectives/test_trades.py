"""TRADES against the formula of Zhang et al. 2019, written out by hand."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from dat.attacks import PGD, Victim
from dat.fields import SettingError
from dat.losses import NO_LABEL
from dat.objectives import TRADES, Batch
from dat.threat import ThreatModel
from tests.objectives.cases import CLASSES, case, kl, net, surprise

betas = pytest.mark.parametrize("beta", [0.0, 1.0, 6.0])


@betas
def test_loss_is_the_clean_loss_and_beta_times_the_kl(beta: float) -> None:
    model, (batch, x_adv) = net(), case()
    clean, adversarial = model(batch.x), model(x_adv)
    expected = surprise(clean, batch.y) + beta * kl(clean, adversarial)
    found = TRADES(beta=beta).loss(model, batch, x_adv)
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(found.logits, adversarial)


@betas
def test_it_is_what_torch_makes_of_it(beta: float) -> None:
    """The authors' way: the mean over the batch, with the clean prediction as kl_div's target."""
    model, (batch, x_adv) = net(), case()
    clean, adversarial = model(batch.x), model(x_adv)
    apart = F.kl_div(adversarial.log_softmax(1), clean.softmax(1), reduction="batchmean")
    expected = F.cross_entropy(clean, batch.y, label_smoothing=0.3) + beta * apart
    found = TRADES(beta=beta, label_smoothing=0.3).loss(model, batch, x_adv).loss
    torch.testing.assert_close(found.mean(), expected)


def test_phi_is_the_kl_from_the_clean_prediction() -> None:
    model, (batch, x_adv) = net(), case()
    phi = TRADES(beta=3, label_smoothing=0.5).phi(model, batch)
    torch.testing.assert_close(phi(x_adv), kl(model(batch.x), model(x_adv)))
    assert isinstance(phi, Victim)
    wrong = model(x_adv).argmax(1) != batch.y
    assert wrong.any() and not wrong.all()
    assert torch.equal(phi.see(x_adv)[1], wrong)


def test_phi_is_flat_at_the_image_so_an_attack_needs_a_random_start() -> None:
    model, (batch, _) = net(), case()
    phi, threat = TRADES().phi(model, batch), ThreatModel(norm="l2", eps=0.3)
    x = batch.x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(phi(x).sum(), x)
    assert phi(x).abs().max() < 1e-12 and gradient.abs().max() < 1e-12
    started = PGD(steps=5)(phi, batch.x, threat)
    assert (phi(started) > 1e-3).all()


def test_both_predictions_learn() -> None:
    """The KL pulls at the clean prediction as well: it is not held fixed."""
    model, (batch, x_adv) = net(), case()
    parameters = list(model.parameters())
    clean, adversarial = model(batch.x), model(x_adv)
    ours, whole, half = (
        torch.autograd.grad(loss.sum(), parameters, retain_graph=True)
        for loss in (
            TRADES(beta=2).loss(model, batch, x_adv).loss,
            surprise(clean, batch.y) + 2 * kl(clean, adversarial),
            surprise(clean, batch.y) + 2 * kl(clean.detach(), adversarial),
        )
    )
    for found, expected, other in zip(ours, whole, half, strict=True):
        torch.testing.assert_close(found, expected)
        assert (found - other).abs().max() > 1e-3


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
    some = Batch.of(batch.x, y, threat=batch.threat)
    objective = TRADES(beta=2, label_smoothing=smoothing)
    found = objective.loss(model, some, x_adv).loss
    torch.testing.assert_close(found[::2], 2 * kl(model(batch.x), model(x_adv))[::2])
    torch.testing.assert_close(found[1::2], objective.loss(model, batch, x_adv).loss[1::2])
    phi, everybody = (objective.phi(model, it)(x_adv) for it in (some, batch))
    torch.testing.assert_close(phi, everybody)
    gradients = torch.autograd.grad(found.sum(), list(model.parameters()))
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)
    objective.check_labels()


def test_the_label_is_never_attacked() -> None:
    """phi knows the labels, for attacks that ask, and does not depend on them."""
    model, (batch, x_adv) = net(), case()
    other = Batch.of(batch.x, (batch.y + 1) % CLASSES, threat=batch.threat)
    first, second = (TRADES().phi(model, it)(x_adv) for it in (batch, other))
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
