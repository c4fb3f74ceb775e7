"""MART against the formula of Wang et al. 2020."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dat.attacks import PGD
from dat.core.settings import SettingError
from dat.objectives import MART
from tests.objectives.cases import case, kl, net, of_label, probabilities, surprise


def boosted(logits: Tensor, y: Tensor) -> Tensor:
    """-log p(label) - log(1 - max p of the other classes), image by image."""
    rows = []
    for p, label in zip(probabilities(logits), y.tolist(), strict=True):
        other = torch.cat((p[:label], p[label + 1 :])).max()
        rows.append(-torch.log(p[label]) - torch.log(1 - other))
    return torch.stack(rows)


betas = pytest.mark.parametrize("beta", [0.0, 1.0, 5.0])


@betas
def test_loss_is_the_boosted_loss_and_the_kl_by_how_wrong_the_clean_image_is(beta: float) -> None:
    model, (batch, x_adv) = net(), case()
    clean, adversarial = model(batch.x), model(x_adv)
    p_wrong = 1 - of_label(probabilities(clean), batch.y)
    expected = boosted(adversarial, batch.y) + beta * kl(clean, adversarial) * p_wrong
    outcome = MART(beta=beta).loss(model, batch, x_adv)
    torch.testing.assert_close(outcome.loss, expected)
    torch.testing.assert_close(outcome.logits, adversarial)


@betas
def test_it_is_the_authors_own_loss_but_for_their_guards_against_log_0(beta: float) -> None:
    """They add 1e-4 to 1 - p and 1e-12 to p, which changes the mean by less than 0.1 %."""
    model, (batch, x_adv) = net(), case()
    clean, p = model(batch.x), model(x_adv).softmax(1)
    second, first = p.argsort(1)[:, -2:].unbind(1)
    rival = torch.where(first == batch.y, second, first)
    margin = F.nll_loss((1.0001 - p + 1e-12).log(), rival)
    apart = F.kl_div((p + 1e-12).log(), clean.softmax(1), reduction="none").sum(1)
    p_wrong = 1.0000001 - clean.softmax(1).gather(1, batch.y.unsqueeze(1)).squeeze(1)
    expected = F.cross_entropy(model(x_adv), batch.y) + margin + beta * (apart * p_wrong).mean()
    loss = MART(beta=beta).loss(model, batch, x_adv).loss.mean()
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)


def test_the_weight_of_the_kl_has_a_gradient() -> None:
    """As in the authors' code, the weight is not detached."""
    model, (batch, x_adv) = net(), case()
    parameters = list(model.parameters())
    clean, adversarial = model(batch.x), model(x_adv)
    p_wrong = 1 - of_label(probabilities(clean), batch.y)
    ours, full, held = (
        torch.autograd.grad(loss.sum(), parameters, retain_graph=True)
        for loss in (
            MART(beta=4).loss(model, batch, x_adv).loss,
            boosted(adversarial, batch.y) + 4 * kl(clean, adversarial) * p_wrong,
            boosted(adversarial, batch.y) + 4 * kl(clean, adversarial) * p_wrong.detach(),
        )
    )
    for actual, expected, other in zip(ours, full, held, strict=True):
        torch.testing.assert_close(actual, expected)
        assert (actual - other).abs().max() > 1e-3


def test_phi_is_the_plain_cross_entropy() -> None:
    model, (batch, x_adv) = net(), case()
    torch.testing.assert_close(
        MART(beta=3).phi(model, batch)(x_adv), surprise(model(x_adv), batch.y)
    )


@betas
def test_without_a_perturbation_it_is_the_boosted_loss(beta: float) -> None:
    model, (batch, _) = net(), case(eps=0)
    objective = MART(beta=beta)
    x_adv = PGD(steps=2)(objective.phi(model, batch), batch.x, batch.threat)
    loss = objective.loss(model, batch, x_adv).loss
    torch.testing.assert_close(loss, boosted(model(batch.x), batch.y))
    assert (loss > surprise(model(batch.x), batch.y)).all()


def test_an_image_that_is_surely_right_has_no_kl() -> None:
    """The clean image is certainly class 0, the adversarial one is not."""
    batch, x_adv = case()
    zeros = torch.zeros_like(batch.y)
    logits = torch.eye(5, dtype=torch.float64)[zeros]

    def model(x: Tensor) -> Tensor:
        return torch.cat((800 * logits, logits))

    right = MART(beta=50).loss(model, type(batch).of(batch.x, zeros), x_adv).loss
    torch.testing.assert_close(right, boosted(logits, zeros))
    wrong = MART(beta=50).loss(model, type(batch).of(batch.x, zeros + 1), x_adv).loss
    assert (wrong > boosted(logits, zeros + 1) + 10).all()


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(SettingError, match=r"MART\.beta = -1: must be at least 0"):
        MART(beta=-1)
