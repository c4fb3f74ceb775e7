"""Properties of every registered objective."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from dat.attacks import ATTACKS, PGD, AttackTarget
from dat.attacks.target import value_and_grad
from dat.core.losses import cross_entropy, soft_labels
from dat.core.settings import SettingError
from dat.core.threat import ThreatModel
from dat.objectives import (
    OBJECTIVES,
    TRADES,
    Adversarial,
    Batch,
    GradAlign,
    LogitPairing,
    Noisy,
    Objective,
)
from dat.objectives.labels import LabelSmoothing
from tests.attacks.cases import cheap, takes_a_closure

CLASSES = 4


class Counted(nn.Module):
    """A small network that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.first = nn.utils.skip_init(nn.Linear, 9, 8, bias=False, dtype=torch.float64)
        self.second = nn.utils.skip_init(nn.Linear, 8, CLASSES, bias=False, dtype=torch.float64)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=random)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        logits: Tensor = self.second(torch.tanh(self.first(x.flatten(1))))
        return logits


def variants() -> list[Objective]:
    """Each objective with its defaults, and with each number higher by 0.5."""
    objectives = []
    for kind in OBJECTIVES.values():
        objective = kind()
        objectives.append(objective)
        for field in dataclasses.fields(kind):
            value = getattr(objective, field.name)
            if isinstance(value, float):
                with_more = {field.name: value + 0.5}
                objectives.append(dataclasses.replace(objective, **with_more))
    return objectives


every_objective = pytest.mark.parametrize("objective", variants(), ids=repr)


def batch(n: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Clean images, perturbed images, labels."""
    random = torch.Generator().manual_seed(1)
    x = torch.rand(n, 1, 3, 3, generator=random, dtype=torch.float64)
    noise = torch.rand(n, 1, 3, 3, generator=random, dtype=torch.float64) - 0.5
    return x, (x + 0.2 * noise).clamp(0, 1), torch.randint(CLASSES, (n,), generator=random)


@every_objective
def test_loss_calls_the_network_once(objective: Objective) -> None:
    net = Counted()
    x, x_adv, y = batch()
    objective.loss(net, Batch.of(x, y), x_adv)
    assert net.calls == 1


@every_objective
def test_outcome_has_one_loss_each_and_the_logits_of_the_adversarial_images(
    objective: Objective,
) -> None:
    net, (x, x_adv, y) = Counted(), batch()
    outcome = objective.loss(net, Batch.of(x, y), x_adv)
    assert outcome.loss.shape == (6,)
    assert outcome.loss.isfinite().all()
    assert outcome.logits.shape == (6, CLASSES)
    if not isinstance(objective, Noisy):  # those have the vote of noisy copies
        torch.testing.assert_close(outcome.logits, net(x_adv))


@every_objective
def test_losses_of_samples_are_independent(objective: Objective) -> None:
    net, (x, x_adv, y) = Counted(), batch()
    rows = torch.tensor([4, 1, 2])
    full = Batch.of(x, y)
    together = objective.loss(net, full, x_adv).loss[rows]
    apart = objective.loss(net, full.select(rows), x_adv[rows]).loss
    torch.testing.assert_close(apart, together)


takes_soft_labels = pytest.mark.parametrize(
    "objective", [one for one in variants() if not one.soft_labels_conflict()], ids=repr
)


@takes_soft_labels
def test_losses_are_affine_in_the_labels(objective: Objective) -> None:
    """Soft labels of one class give the loss of that class; mixed ones, the mean of two losses.
    Parts without a label, such as a KL divergence, stay: the weights sum to 1. GradAlign's cosine
    is of a gradient, so it is not linear."""
    net, (x, x_adv, y) = Counted(), batch()
    weights = (1.0,) if objective.second_derivatives else (1.0, 0.3)
    one, other = soft_labels(y, CLASSES), soft_labels(y.flip(0), CLASSES)
    for weight in weights:
        mixed = Batch.of(x, weight * one + (1 - weight) * other)
        parts = [Batch.of(x, labels) for labels in (y, y.flip(0))]
        loss, *losses = (objective.loss(net, b, x_adv).loss for b in (mixed, *parts))
        torch.testing.assert_close(loss, weight * losses[0] + (1 - weight) * losses[1])
        if not isinstance(objective, Noisy):  # phi of the vote is no cross-entropy of one pass
            phi, *phis = (objective.phi(net, b)(x_adv) for b in (mixed, *parts))
            torch.testing.assert_close(phi, weight * phis[0] + (1 - weight) * phis[1])


@takes_soft_labels
@pytest.mark.parametrize(
    "name", [name for name in ATTACKS if not ATTACKS[name]().soft_labels_conflict()]
)
def test_attacks_maximise_the_loss_of_soft_labels(objective: Objective, name: str) -> None:
    net, (x, _, y) = Counted(), batch()
    mixed = 0.6 * soft_labels(y, CLASSES) + 0.4 * soft_labels(y.flip(0), CLASSES)
    phi, attack = objective.phi(net, Batch.of(x, mixed)), cheap(ATTACKS[name](), steps=5)
    x_adv = attack(phi, x, ThreatModel(eps=0.05))
    starts_at_image = name in ("none", "free")
    gain = (phi(x_adv) - phi(x)).sum()
    assert gain > (-1e-12 if starts_at_image else 0)


def test_components_that_need_one_label_say_so() -> None:
    refusing = {name for name, kind in ATTACKS.items() if kind().soft_labels_conflict()}
    assert refusing == {"apgd-t", "fab", "square"}
    assert {name for name, kind in OBJECTIVES.items() if kind().soft_labels_conflict()} == {"mart"}
    for attack, setting in (
        (PGD(loss="margin"), "attack.loss = margin"),
        (PGD(patience=2), "attack.patience = 2"),
    ):
        assert attack.soft_labels_conflict().startswith(setting)
    assert PGD(loss="cross-entropy").soft_labels_conflict() == ""


@pytest.mark.parametrize("kind", [Adversarial, GradAlign, LogitPairing])
def test_the_attack_may_use_the_smoothed_labels(kind: type[LabelSmoothing]) -> None:
    net, (x, x_adv, y) = Counted(), batch()
    for smooth_attack, smoothing in ((False, 0.0), (True, 0.3)):
        objective = kind(label_smoothing=0.3, smooth_attack=smooth_attack)
        phi = objective.phi(net, Batch.of(x, y))(x_adv)
        torch.testing.assert_close(phi, cross_entropy(net(x_adv), y, smoothing=smoothing))
        smoothed, plain = (o.loss(net, Batch.of(x, y), x_adv).loss for o in (objective, kind()))
        assert not torch.allclose(smoothed, plain)


@every_objective
def test_gradient_reaches_every_parameter(objective: Objective) -> None:
    net = Counted()
    x, x_adv, y = batch()
    objective.loss(net, Batch.of(x, y), x_adv).loss.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in net.parameters())


@every_objective
def test_phi_is_one_number_each_that_depends_on_its_own_image_alone(objective: Objective) -> None:
    net, (x, x_adv, y) = Counted(), batch()
    x_adv.requires_grad_(True)
    phi = objective.phi(net, Batch.of(x, y))(x_adv)
    assert phi.shape == (6,)
    (gradient,) = torch.autograd.grad(phi[2], x_adv)
    touched = gradient.flatten(1).abs().sum(1) > 0
    assert touched.nonzero().flatten().tolist() == [2]


@every_objective
def test_ascending_phi_raises_phi_and_the_loss(objective: Objective) -> None:
    """Starting from the image itself, except for TRADES, whose KL has its minimum there."""
    net, (x, _, y) = Counted(), batch()
    full = Batch.of(x, y)
    phi = objective.phi(net, full)
    attack = PGD(random_start=isinstance(objective, TRADES))
    x_adv = attack(phi, x, ThreatModel(eps=0.02))
    assert (phi(x_adv) > phi(x)).all()
    higher, before = (objective.loss(net, full, images).loss.sum() for images in (x_adv, x))
    assert higher > before


@pytest.mark.parametrize("kind", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_raises_phi_within_its_reach(kind: type[Objective], name: str) -> None:
    """Or raises that it needs the labels, which a phi that is a plain closure does not have. Free
    starts from the image, where the gradient of TRADES is 0 up to rounding."""
    net, (x, _, y) = Counted(), batch()
    phi, threat = kind().phi(net, Batch.of(x, y)), ThreatModel(eps=0.05)
    attack = cheap(ATTACKS[name](), steps=5, queries=30)
    if not isinstance(phi, AttackTarget) and not takes_a_closure(attack):
        with pytest.raises(ValueError, match="needs the network and the labels"):
            attack(phi, x, threat)
        return
    x_adv = attack(phi, x, threat)
    assert threat.size(x_adv, x).max() <= attack.reach * 0.05 + 1e-9
    assert x_adv.min() >= 0 and x_adv.max() <= 1
    gain = (phi(x_adv) - phi(x)).sum()
    if name == "none":
        assert gain == 0
    elif kind is TRADES and name == "free":
        assert gain >= -1e-12
    else:
        assert gain > 0


@every_objective
def test_gradient_is_that_of_finite_differences(objective: Objective) -> None:
    """For each sample's loss and each weight of a small network."""
    random = torch.Generator().manual_seed(2)
    net = nn.Sequential(nn.Flatten(), nn.Linear(9, 3), nn.Tanh(), nn.Linear(3, CLASSES)).double()
    for parameter in net.parameters():
        nn.init.normal_(parameter, generator=random)
    names, weights = zip(*net.named_parameters(), strict=True)
    x, x_adv, y = batch(3)
    everybody = Batch.of(x, y, threat=ThreatModel(eps=0.2))

    def loss(*values: Tensor) -> Tensor:
        given = dict(zip(names, values, strict=True))
        return objective.loss(lambda z: functional_call(net, given, (z,)), everybody, x_adv).loss

    assert torch.autograd.gradcheck(loss, weights, eps=1e-6, atol=1e-6, rtol=1e-5)


@every_objective
@pytest.mark.parametrize("scale", [1e2, 1e4, 1e8, 1e15])
def test_extreme_logits_have_finite_losses_and_gradients(
    objective: Objective, scale: float
) -> None:
    """In single precision, with one dominant class, another one, or none, for the clean image, the
    adversarial one, and the label."""
    pictures = torch.cat((torch.eye(CLASSES), torch.zeros(1, CLASSES), torch.ones(1, CLASSES)))
    count = len(pictures)
    cases = torch.cartesian_prod(torch.arange(count), torch.arange(count), torch.arange(CLASSES))
    x, x_adv = (pictures[rows].reshape(-1, 1, 2, 2) for rows in cases[:, :2].T)
    linear = nn.Linear(CLASSES, CLASSES)
    with torch.no_grad():
        linear.weight.copy_(scale * torch.eye(CLASSES))
        linear.bias.zero_()
    net = nn.Sequential(nn.Flatten(), linear)
    everybody = Batch.of(x, cases[:, 2], threat=ThreatModel(eps=0.1))
    outcome = objective.loss(net, everybody, x_adv)
    outcome.loss.sum().backward()
    assert outcome.loss.isfinite().all() and (outcome.loss > -1e-3).all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    value = value_and_grad(objective.phi(net, everybody), x_adv)
    assert value.loss.isfinite().all() and value.gradient.isfinite().all()
    # these labels are wrong, so there is something to learn however sure the network is
    assert outcome.loss.max() > scale / 10


@every_objective
def test_repr_shows_every_hyperparameter(objective: Objective) -> None:
    for field in dataclasses.fields(objective):
        assert f"{field.name}={getattr(objective, field.name)!r}" in repr(objective)


@pytest.mark.parametrize("kind", OBJECTIVES.values(), ids=OBJECTIVES)
def test_wrong_settings_are_refused(kind: type[Objective]) -> None:
    for field in dataclasses.fields(kind):
        with pytest.raises(SettingError, match=rf"{kind.__name__}\.{field.name} = 'no number'"):
            kind(**{field.name: "no number"})
