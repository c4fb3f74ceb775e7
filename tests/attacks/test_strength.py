"""On a trained network: more effort finds more, and foolbox finds as much."""

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
    NoAttack,
    Square,
    TargetedAPGD,
    Victim,
)
from dat.data import load
from dat.rng import Draws
from dat.threat import ThreatModel

STEPS = 10
LINF, L2 = ThreatModel(norm="linf", eps=0.1), ThreatModel(norm="l2", eps=0.5)
"""At these radii the network below loses about half of its images."""

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
def victim() -> Trained:
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
    victim = Trained(net.eval(), *data.test.batch(torch.arange(len(data.test)), cpu))
    assert victim.right(victim.x).float().mean() > 0.9
    return victim


@pytest.fixture(scope="module")
def foolbox() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports scipy by a deprecated path
        import foolbox
    return foolbox


@both_threats
def test_more_steps_raise_the_loss(victim: Trained, threat: ThreatModel) -> None:
    means = [float(victim.loss_after(PGD(steps=k), threat).mean()) for k in (1, 5, 20)]
    assert means == sorted(means)
    assert means[0] > victim.loss_after(NoAttack(), threat).mean()


@both_threats
def test_fgsm_is_weaker_than_pgd(victim: Trained, threat: ThreatModel) -> None:
    assert victim.loss_after(FGSM(), threat).mean() < victim.loss_after(PGD(), threat).mean()


@both_threats
def test_restarts_never_lower_the_loss_of_a_sample(victim: Trained, threat: ThreatModel) -> None:
    one, two, four = (
        victim.loss_after(PGD(steps=5, restarts=restarts), threat) for restarts in (1, 2, 4)
    )
    assert (two >= one).all() and (four >= two).all()
    assert (two > one).any() and (four > two).any()


@both_threats
def test_apgd_is_at_least_as_strong_as_pgd(victim: Trained, threat: ThreatModel) -> None:
    pgd, apgd = (
        attack(victim.loss, victim.x, threat) for attack in (PGD(steps=20), APGD(steps=20))
    )
    with torch.no_grad():
        assert victim.loss(apgd).mean() >= victim.loss(pgd).mean()
    assert victim.right(apgd).sum() <= victim.right(pgd).sum() + 1


@both_threats
def test_attacks_that_stop_at_a_wrong_answer_break_as_many_as_pgd(
    victim: Trained, threat: ThreatModel
) -> None:
    """To within two images; together at least as many; and Square, which is blind, a third."""
    some = Trained(victim.net, victim.x[:150], victim.y[:150])
    goal = Victim(some.net, some.y, until_broken=True)
    left = {
        type(attack): some.right(attack(goal, some.x, threat))
        for attack in (
            PGD(steps=20),
            APGD(steps=20),
            TargetedAPGD(steps=20, targets=3),
            FAB(steps=20, targets=3),
            Square(queries=100),
        )
    }
    pgd, clean = left.pop(PGD), some.right(some.x)
    for kind in (APGD, TargetedAPGD, FAB):
        assert left[kind].sum() <= pgd.sum() + 2
    assert 3 * (clean & ~left[Square]).sum() > (clean & ~pgd).sum()
    assert torch.stack(list(left.values())).all(0).sum() <= pgd.sum()


def as_foolbox_does(
    foolbox: Any, attack: Any, victim: Trained, eps: float, seed: int = 0
) -> Tensor:
    model = foolbox.PyTorchModel(victim.net, bounds=(0, 1), device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        x_adv: Tensor = attack(model, victim.x, victim.y, epsilons=eps)[1]
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
    victim: Trained, threat: ThreatModel, foolbox: Any
) -> None:
    pgd, their_pgd = pgd_pair(foolbox, threat, random_start=False)
    ours = pgd(victim.loss, victim.x, threat)
    theirs = as_foolbox_does(foolbox, their_pgd, victim, threat.eps)
    assert (victim.right(ours) == victim.right(theirs)).sum() >= len(victim.y) - 1
    # rounding may turn the sign of a gradient that is all but zero
    assert ((ours - theirs).abs() < 1e-4).float().mean() > 0.99


def test_fgsm_without_random_start_is_that_of_foolbox(victim: Trained, foolbox: Any) -> None:
    ours = FGSM(step_ratio=1, random_start=False)(victim.loss, victim.x, LINF)
    attack = foolbox.attacks.LinfFastGradientAttack(random_start=False)
    theirs = as_foolbox_does(foolbox, attack, victim, LINF.eps)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@both_threats
def test_pgd_has_the_robust_accuracy_of_foolbox(
    victim: Trained, threat: ThreatModel, foolbox: Any
) -> None:
    ours, theirs = pgd_pair(foolbox, threat, random_start=True)
    check_same_robust_accuracy(foolbox, victim, threat, ours, theirs)


def test_fgsm_has_the_robust_accuracy_of_foolbox(victim: Trained, foolbox: Any) -> None:
    theirs = foolbox.attacks.LinfFastGradientAttack(random_start=True)
    check_same_robust_accuracy(foolbox, victim, LINF, FGSM(step_ratio=1), theirs)


def check_same_robust_accuracy(
    foolbox: Any, victim: Trained, threat: ThreatModel, ours: Attack, theirs: Any
) -> None:
    """The random starts differ, so it is the mean of three that has to agree, to 2 points."""
    index = torch.arange(len(victim.y))
    right = []
    for seed in range(3):
        streams = Draws.of(seed, "test", index=index)
        right.append(victim.right(ours(victim.loss, victim.x, threat, streams)))
    for seed in range(3):
        right.append(victim.right(as_foolbox_does(foolbox, theirs, victim, threat.eps, seed)))
    ra, ra_of_foolbox = 100 * torch.stack(right).double().mean(1).reshape(2, 3).mean(1)
    assert 20 < ra_of_foolbox < 80
    assert abs(ra - ra_of_foolbox) <= 2
