"""On a trained network: more steps are stronger, and foolbox is equally strong."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dat
from dat.attacks import (
    APGD,
    FAB,
    FGSM,
    PGD,
    Attack,
    AttackTarget,
    NoAttack,
    Square,
    TargetedAPGD,
)
from dat.core.rng import Streams
from dat.core.threat import ThreatModel
from dat.data import load

STEPS = 10
LINF, L2 = ThreatModel(norm="linf", eps=0.1), ThreatModel(norm="l2", eps=0.5)
"""Radii at which about half of the images are misclassified."""

both_threats = pytest.mark.parametrize("threat", [LINF, L2], ids=repr)


@dataclass(frozen=True)
class Trained:
    """A network trained on clean digits, and the test set."""

    net: nn.Module
    x: Tensor
    y: Tensor

    def loss(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), self.y, reduction="none")

    def loss_after(self, attack: Attack, threat: ThreatModel) -> Tensor:
        with torch.no_grad():
            return self.loss(attack(self.loss, self.x, threat))

    def right(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            right: Tensor = self.net(x).argmax(1) == self.y
        return right


@pytest.fixture(scope="module")
def trained() -> Trained:
    data, cpu = load("digits"), torch.device("cpu")
    net = dat.normalized(dat.build_model("cnn", 10, channels=1, width=8), data.mean, data.std)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    shuffle = torch.Generator().manual_seed(0)
    for _ in range(6):
        for rows in torch.randperm(len(data.train), generator=shuffle).split(64):
            x, y = data.train.batch(rows, cpu)
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    trained = Trained(net.eval(), *data.test.batch(torch.arange(len(data.test)), cpu))
    assert trained.right(trained.x).float().mean() > 0.9
    return trained


@pytest.fixture(scope="module")
def foolbox() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports scipy by a deprecated path
        import foolbox
    return foolbox


@both_threats
def test_more_steps_raise_the_loss(trained: Trained, threat: ThreatModel) -> None:
    means = [float(trained.loss_after(PGD(steps=k), threat).mean()) for k in (1, 5, 20)]
    assert means == sorted(means)
    assert means[0] > trained.loss_after(NoAttack(), threat).mean()


@both_threats
def test_fgsm_is_weaker_than_pgd(trained: Trained, threat: ThreatModel) -> None:
    assert trained.loss_after(FGSM(), threat).mean() < trained.loss_after(PGD(), threat).mean()


@both_threats
def test_restarts_never_lower_the_loss_of_a_sample(trained: Trained, threat: ThreatModel) -> None:
    one, two, four = (
        trained.loss_after(PGD(steps=5, restarts=restarts), threat) for restarts in (1, 2, 4)
    )
    assert (two >= one).all() and (four >= two).all()
    assert (two > one).any() and (four > two).any()


@both_threats
def test_apgd_is_at_least_as_strong_as_pgd(trained: Trained, threat: ThreatModel) -> None:
    pgd, apgd = (
        attack(trained.loss, trained.x, threat) for attack in (PGD(steps=20), APGD(steps=20))
    )
    with torch.no_grad():
        assert trained.loss(apgd).mean() >= trained.loss(pgd).mean()
    assert trained.right(apgd).sum() <= trained.right(pgd).sum() + 1


@both_threats
def test_attacks_that_stop_at_a_wrong_answer_break_as_many_as_pgd(
    trained: Trained, threat: ThreatModel
) -> None:
    """Each to within two images, all together at least as many, and black-box Square a third."""
    subset = Trained(trained.net, trained.x[:150], trained.y[:150])
    goal = AttackTarget(subset.net, subset.y, until_broken=True)
    left = {
        type(attack): subset.right(attack(goal, subset.x, threat))
        for attack in (
            PGD(steps=20),
            APGD(steps=20),
            TargetedAPGD(steps=20, targets=3),
            FAB(steps=20, targets=3),
            Square(queries=100),
        )
    }
    pgd, clean = left.pop(PGD), subset.right(subset.x)
    for kind in (APGD, TargetedAPGD, FAB):
        assert left[kind].sum() <= pgd.sum() + 2
    assert 3 * (clean & ~left[Square]).sum() > (clean & ~pgd).sum()
    assert torch.stack(list(left.values())).all(0).sum() <= pgd.sum()


def as_foolbox_does(
    foolbox: Any, attack: Any, trained: Trained, eps: float, seed: int = 0
) -> Tensor:
    model = foolbox.PyTorchModel(trained.net, bounds=(0, 1), device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        x_adv: Tensor = attack(model, trained.x, trained.y, epsilons=eps)[1]
    return x_adv


def pgd_pair(foolbox: Any, threat: ThreatModel, *, random_start: bool) -> tuple[PGD, Any]:
    step = threat.eps / 4
    theirs = foolbox.attacks.LinfPGD if threat.norm == "linf" else foolbox.attacks.L2PGD
    return (
        PGD(steps=STEPS, step_size=step, random_start=random_start),
        theirs(steps=STEPS, abs_stepsize=step, random_start=random_start),
    )


@both_threats
def test_pgd_without_random_start_is_that_of_foolbox(
    trained: Trained, threat: ThreatModel, foolbox: Any
) -> None:
    pgd, their_pgd = pgd_pair(foolbox, threat, random_start=False)
    ours = pgd(trained.loss, trained.x, threat)
    theirs = as_foolbox_does(foolbox, their_pgd, trained, threat.eps)
    assert (trained.right(ours) == trained.right(theirs)).sum() >= len(trained.y) - 1
    # rounding may turn the sign of a gradient that is all but zero
    assert ((ours - theirs).abs() < 1e-4).float().mean() > 0.99


def test_fgsm_without_random_start_is_that_of_foolbox(trained: Trained, foolbox: Any) -> None:
    ours = FGSM(step_ratio=1, random_start=False)(trained.loss, trained.x, LINF)
    attack = foolbox.attacks.LinfFastGradientAttack(random_start=False)
    theirs = as_foolbox_does(foolbox, attack, trained, LINF.eps)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@both_threats
def test_pgd_has_the_robust_accuracy_of_foolbox(
    trained: Trained, threat: ThreatModel, foolbox: Any
) -> None:
    ours, theirs = pgd_pair(foolbox, threat, random_start=True)
    check_same_robust_accuracy(foolbox, trained, threat, ours, theirs)


def test_fgsm_has_the_robust_accuracy_of_foolbox(trained: Trained, foolbox: Any) -> None:
    theirs = foolbox.attacks.LinfFastGradientAttack(random_start=True)
    check_same_robust_accuracy(foolbox, trained, LINF, FGSM(step_ratio=1), theirs)


def check_same_robust_accuracy(
    foolbox: Any, trained: Trained, threat: ThreatModel, ours: Attack, theirs: Any
) -> None:
    """The random starts differ, so the mean of three runs has to agree, within 2 points."""
    index = torch.arange(len(trained.y))
    right = []
    for seed in range(3):
        streams = Streams.of(seed, "test", index=index)
        right.append(trained.right(ours(trained.loss, trained.x, threat, streams)))
    for seed in range(3):
        right.append(trained.right(as_foolbox_does(foolbox, theirs, trained, threat.eps, seed)))
    ra, ra_of_foolbox = 100 * torch.stack(right).double().mean(1).reshape(2, 3).mean(1)
    assert 20 < ra_of_foolbox < 80
    assert abs(ra - ra_of_foolbox) <= 2
