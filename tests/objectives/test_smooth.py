"""Smooth-AT, Gaussian augmentation and stability training against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dat.attacks import ATTACKS, PGD, Attack, NoAttack, Square
from dat.core.settings import SettingError
from dat.core.smoothing import Smoothed
from dat.core.threat import ThreatModel
from dat.objectives import Batch, Smooth, Stability

CLASSES = 5
L2 = ThreatModel(norm="l2", eps=0.2)


@pytest.fixture
def net() -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, CLASSES)).double()
    random = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, generator=random)
    return net


@pytest.fixture
def batch() -> Batch:
    random = torch.Generator().manual_seed(1)
    x = torch.rand(6, 1, 4, 4, generator=random, dtype=torch.float64)
    return Batch.of(x, torch.randint(CLASSES, (6,), generator=random))


def by_hand(net: nn.Module, x: Tensor, batch: Batch, sigma: float, copies: int) -> Tensor:
    """-log of the mean probability, image by image."""
    rows = []
    for image, (picture, label) in enumerate(zip(x, batch.y.tolist(), strict=True)):
        chances = [
            torch.softmax(net((picture + sigma * batch.noise(copy)[image]).unsqueeze(0)), 1)
            for copy in range(copies)
        ]
        rows.append(-torch.log(torch.stack(chances)[:, 0, label].mean()))
    return torch.stack(rows)


@pytest.mark.parametrize("copies", [1, 2, 7])
def test_phi_is_minus_log_of_the_mean_probability(
    net: nn.Module, batch: Batch, copies: int
) -> None:
    phi = Smooth(sigma=0.3, copies=copies).phi(net, batch)
    torch.testing.assert_close(phi(batch.x), by_hand(net, batch.x, batch, 0.3, copies))


def test_the_soft_update_descends_phi(net: nn.Module, batch: Batch) -> None:
    objective = Smooth(sigma=0.3, copies=4, update="soft")
    outcome = objective.loss(net, batch, batch.x)
    torch.testing.assert_close(outcome.loss, objective.phi(net, batch)(batch.x))
    torch.testing.assert_close(outcome.logits.exp().sum(1), torch.ones(6, dtype=torch.float64))


def test_the_update_of_the_copies_is_their_mean_cross_entropy(net: nn.Module, batch: Batch) -> None:
    """As in Salman et al.; with one copy it equals the soft loss."""
    losses = Smooth(sigma=0.3, copies=4).loss(net, batch, batch.x).loss
    by_copy = [F.cross_entropy(net(batch.x + 0.3 * batch.noise(j)), batch.y) for j in range(4)]
    torch.testing.assert_close(losses.mean(), torch.stack(by_copy).mean())
    one, soft = (
        Smooth(copies=1, update=update).loss(net, batch, batch.x) for update in ("copies", "soft")
    )
    torch.testing.assert_close(one.loss, soft.loss)


def test_without_an_attack_it_is_gaussian_augmentation(net: nn.Module, batch: Batch) -> None:
    objective = Smooth(sigma=0.5, copies=1)
    x_adv = NoAttack()(objective.phi(net, batch), batch.x, L2)
    noisy = batch.x + 0.5 * batch.noise(0)
    expected = F.cross_entropy(net(noisy), batch.y, reduction="none")
    torch.testing.assert_close(objective.loss(net, batch, x_adv).loss, expected)


def test_attack_and_update_see_the_same_noise_and_another_batch_other_noise(batch: Batch) -> None:
    assert batch.noise(3) is batch.noise(3)
    other = Batch.of(batch.x, batch.y, seed=1)
    assert not torch.equal(other.noise(3), batch.noise(3))
    assert not torch.equal(batch.noise(2), batch.noise(3))
    assert torch.equal(batch.select(torch.tensor([4, 2])).noise(3), batch.noise(3)[[4, 2]])


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_works_on_it(name: str, net: nn.Module, batch: Batch) -> None:
    attack: Attack = Square(queries=50) if name == "square" else ATTACKS[name]()
    objective = Smooth(sigma=0.1, copies=3)
    phi = objective.phi(net, batch)
    x_adv = attack(phi, batch.x, L2)
    assert L2.size(x_adv, batch.x).max() <= attack.reach * L2.eps + 1e-9
    if name != "none":
        assert phi(x_adv).sum() >= phi(batch.x).sum()


def test_linf_is_a_threat_as_well(net: nn.Module, batch: Batch) -> None:
    phi = Smooth(sigma=0.1, copies=3).phi(net, batch)
    threat = ThreatModel(eps=0.05)
    x_adv = PGD(steps=5)(phi, batch.x, threat)
    assert (x_adv - batch.x).abs().max() <= 0.05 + 1e-9
    assert (phi(x_adv) > phi(batch.x)).all()


def test_stability_is_the_clean_loss_and_the_cross_entropy_from_clean_to_noisy(
    net: nn.Module, batch: Batch
) -> None:
    objective = Stability(sigma=0.3, copies=3, stability_weight=1.5)
    clean = net(batch.x)
    phi = torch.stack(
        [
            F.cross_entropy(net(batch.x + 0.3 * batch.noise(j)), clean.softmax(1), reduction="none")
            for j in range(3)
        ]
    ).mean(0)
    outcome = objective.loss(net, batch, batch.x)
    expected = F.cross_entropy(clean, batch.y, reduction="none") + 1.5 * phi
    torch.testing.assert_close(outcome.loss, expected)
    by_copy = [net(batch.x + 0.3 * batch.noise(j)).softmax(1) for j in range(3)]
    torch.testing.assert_close(outcome.logits.exp(), torch.stack(by_copy).mean(0))
    torch.testing.assert_close(objective.phi(net, batch)(batch.x), phi)


def test_a_team_needs_a_copy_for_each_worker() -> None:
    Smooth(copies=4).check_subgroup(4)
    with pytest.raises(SettingError, match=r"train.team = 3: must be at most objective.copies = 2"):
        Smooth(copies=2).check_subgroup(3)


def test_what_is_deployed_is_the_vote(net: nn.Module, batch: Batch) -> None:
    deployed = Smooth(sigma=0.2, votes=5).deployed(net)
    assert isinstance(deployed, Smoothed) and (deployed.sigma, deployed.copies) == (0.2, 5)
    torch.testing.assert_close(deployed(batch.x).exp().sum(1), torch.ones(6, dtype=torch.float64))


def test_a_smoothed_network_is_a_function_of_the_image_alone(net: nn.Module, batch: Batch) -> None:
    smoothed = Smoothed(net, sigma=0.4, copies=3)
    full = smoothed(batch.x)
    torch.testing.assert_close(smoothed(batch.x[4:5]), full[4:5])
    torch.testing.assert_close(Smoothed(net, sigma=0.4, copies=3)(batch.x), full)
    assert not torch.allclose(Smoothed(net, sigma=0.4, copies=3, seed=1)(batch.x), full)
    assert smoothed.state_dict().keys() == {f"network.{name}" for name in net.state_dict()}


def test_many_votes_come_near_the_smoothed_probability() -> None:
    """For a linear boundary between two classes, the mean of a steep softmax is Phi(d / sigma)."""

    class Steep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            side = 1e6 * (x[:, 0, 0, 0] - 0.5)
            return torch.stack((-side, side), dim=1)

    x = torch.full((1, 1, 1, 1), 0.6)
    probability = Smoothed(Steep(), sigma=0.2, copies=20_000)(x).exp()[0, 1].item()
    assert probability == pytest.approx(0.5 * (1 + math.erf(0.5 / math.sqrt(2))), abs=0.015)


def test_bad_smoothing_is_refused(net: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"sigma = 0, copies = 8: must be above 0"):
        Smoothed(net, sigma=0)
