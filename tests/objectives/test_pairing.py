"""Adversarial logit pairing against the formula of Kannan et al. 2018."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from dat.attacks import PGD
from dat.core.settings import SettingError
from dat.objectives import Adversarial, LogitPairing
from tests.objectives.cases import CLASSES, case, net, surprise

weights = pytest.mark.parametrize("weight", [0.0, 0.5, 2.0])


@weights
@pytest.mark.parametrize("pairing", [0.0, 0.5, 3.0])
def test_loss_is_both_cross_entropies_and_the_distance_of_the_logits(
    weight: float, pairing: float
) -> None:
    model, (batch, x_adv) = net(), case()
    clean, adversarial = model(batch.x), model(x_adv)
    apart = torch.stack([((a - b) ** 2).sum() for a, b in zip(clean, adversarial, strict=True)])
    expected = weight * surprise(clean, batch.y) + surprise(adversarial, batch.y)
    expected = expected + pairing * apart / CLASSES
    outcome = LogitPairing(clean_weight=weight, pairing_weight=pairing).loss(model, batch, x_adv)
    torch.testing.assert_close(outcome.loss, expected)
    torch.testing.assert_close(outcome.logits, adversarial)


def test_the_distance_is_the_mean_squared_error_of_torch() -> None:
    model, (batch, x_adv) = net(), case()
    paired, alone = (
        LogitPairing(pairing_weight=weight).loss(model, batch, x_adv).loss.mean()
        for weight in (1.0, 0.0)
    )
    torch.testing.assert_close(paired - alone, F.mse_loss(model(batch.x), model(x_adv)))


@weights
def test_without_pairing_it_is_adversarial_training(weight: float) -> None:
    model, (batch, x_adv) = net(), case()
    loss = LogitPairing(clean_weight=weight, pairing_weight=0).loss(model, batch, x_adv)
    expected = Adversarial(clean_weight=weight).loss(model, batch, x_adv)
    torch.testing.assert_close(loss.loss, expected.loss)


def test_phi_is_the_plain_cross_entropy() -> None:
    model, (batch, x_adv) = net(), case()
    phi = LogitPairing(clean_weight=3, pairing_weight=2).phi(model, batch)
    torch.testing.assert_close(phi(x_adv), surprise(model(x_adv), batch.y))


@weights
def test_without_a_perturbation_it_is_one_plus_lambda_cross_entropies(weight: float) -> None:
    model, (batch, _) = net(), case(eps=0)
    objective = LogitPairing(clean_weight=weight)
    x_adv = PGD(steps=2)(objective.phi(model, batch), batch.x, batch.threat)
    expected = (1 + weight) * surprise(model(batch.x), batch.y)
    torch.testing.assert_close(objective.loss(model, batch, x_adv).loss, expected)


@pytest.mark.parametrize("name", ["clean_weight", "pairing_weight"])
def test_impossible_settings_are_refused(name: str) -> None:
    with pytest.raises(SettingError, match=rf"LogitPairing\.{name} = -1: must be at least 0"):
        LogitPairing.read({name: -1.0}, "LogitPairing")
