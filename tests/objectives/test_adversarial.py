"""The objective of adversarial training against the formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dat.attacks import PGD
from dat.core.settings import SettingError
from dat.core.threat import ThreatModel
from dat.objectives import Adversarial, Batch

CLASSES = 5


def net() -> nn.Module:
    linear = nn.Linear(4, CLASSES).double()
    for parameter in linear.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    return nn.Sequential(nn.Flatten(), linear)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    x, x_adv = torch.rand(2, 6, 1, 2, 2, generator=random, dtype=torch.float64)
    return x, x_adv, torch.randint(CLASSES, (6,), generator=random)


def by_hand(logits: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    """The cross-entropy with 1 - s on the label and s spread over all classes."""
    rows = []
    for z, label in zip(logits, y.tolist(), strict=True):
        log_p = z - z.exp().sum().log()
        rows.append(-(1 - smoothing) * log_p[label] - smoothing * log_p.sum() / CLASSES)
    return torch.stack(rows)


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0, 6.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
def test_loss_is_lambda_times_clean_plus_adversarial(weight: float, smoothing: float) -> None:
    model, (x, x_adv, y) = net(), batch()
    objective = Adversarial(clean_weight=weight, label_smoothing=smoothing)
    expected = weight * by_hand(model(x), y, smoothing) + by_hand(model(x_adv), y, smoothing)
    torch.testing.assert_close(objective.loss(model, Batch.of(x, y), x_adv).loss, expected)


@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_label_smoothing_is_that_of_torch(weight: float) -> None:
    model, (x, x_adv, y) = net(), batch()
    loss = (
        Adversarial(clean_weight=weight, label_smoothing=0.3)
        .loss(model, Batch.of(x, y), x_adv)
        .loss
    )
    clean, adversarial = (
        F.cross_entropy(model(images), y, label_smoothing=0.3) for images in (x, x_adv)
    )
    torch.testing.assert_close(loss.mean(), weight * clean + adversarial)


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_without_a_perturbation_it_is_one_plus_lambda_cross_entropies(
    weight: float, smoothing: float
) -> None:
    model, (x, _, y) = net(), batch()
    objective = Adversarial(clean_weight=weight, label_smoothing=smoothing)
    x_adv = PGD(steps=2)(objective.phi(model, Batch.of(x, y)), x, ThreatModel(eps=0))
    expected = (1 + weight) * by_hand(model(x), y, smoothing)
    torch.testing.assert_close(objective.loss(model, Batch.of(x, y), x_adv).loss, expected)


def test_without_a_clean_weight_the_clean_images_are_ignored() -> None:
    model, (x, x_adv, y) = net(), batch()
    nothing = torch.full_like(x, torch.nan)
    outcome = Adversarial().loss(model, Batch.of(nothing, y), x_adv)
    torch.testing.assert_close(outcome.loss, Adversarial().loss(model, Batch.of(x, y), x_adv).loss)
    assert Adversarial(clean_weight=1).loss(model, Batch.of(nothing, y), x_adv).loss.isnan().all()


def test_phi_is_the_plain_cross_entropy() -> None:
    """Only the training loss is smoothed; the attack uses the true label."""
    model, (x, x_adv, y) = net(), batch()
    phi = Adversarial(clean_weight=3, label_smoothing=0.5).phi(model, Batch.of(x, y))
    torch.testing.assert_close(phi(x_adv), by_hand(model(x_adv), y))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("clean_weight", -1, "Adversarial.clean_weight = -1: must be at least 0"),
        ("label_smoothing", 1, "label_smoothing = 1: must be at least 0 and below 1"),
    ],
)
def test_impossible_settings_are_refused(name: str, value: float, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Adversarial.read({name: value}, "Adversarial")


def test_a_team_has_nothing_to_share() -> None:
    Adversarial().check_subgroup(1)
    with pytest.raises(SettingError, match=r"train.team = 2: workers can only share the noisy"):
        Adversarial().check_subgroup(2)
