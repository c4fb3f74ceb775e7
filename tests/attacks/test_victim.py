"""A victim: what it sees, whom it leaves alone, and that what is broken is broken indeed."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from dat.attacks import APGD, FAB, PGD, Attack, Square, Targeted, TargetedAPGD, Victim
from dat.attacks.base import Attempt, worst_of
from dat.losses import cross_entropy, lead, margin, targeted_dlr
from dat.rng import Draws
from dat.threat import ThreatModel
from tests.attacks.cases import Network, answers, both_norms, images, wavy, wrong

BREAKERS = [
    APGD(steps=12),
    APGD(steps=12, loss="dlr"),
    TargetedAPGD(steps=6, targets=3),
    FAB(steps=6, targets=3),
    Square(queries=40),
    PGD(steps=3, restarts=3),
]
"""Those that stop at a wrong answer: within an attempt, or between two."""
RADII = {"linf": 0.03, "l2": 0.12}
"""At these some of the images below fall, early or late, and some never do."""

every_breaker = pytest.mark.parametrize("attack", BREAKERS, ids=repr)


def logits(*rows: list[float]) -> Tensor:
    return torch.tensor(rows)


def case() -> tuple[Network, Tensor, Tensor]:
    """A network, images, and labels of which two are wrong to begin with."""
    x = images((16, 1, 4, 4), dtype=torch.float64)
    network = wavy(16, dtype=torch.float64)
    y = answers(network, x)
    y[[3, 8]] = (y[[3, 8]] + 1) % 5
    return network, x, y


@every_breaker
@both_norms
def test_what_is_broken_is_in_ball_and_box_and_wrong(attack: Attack, norm: str) -> None:
    network, x, y = case()
    threat = ThreatModel(norm=norm, eps=RADII[norm])
    x_adv = attack(Victim(network, y, until_broken=True), x, threat)
    assert (threat.size(x_adv, x) <= threat.eps + 1e-9).all()
    assert x_adv.min() >= 0 and x_adv.max() <= 1
    broken = wrong(network, x_adv, y)
    right = ~wrong(network, x, y)
    assert (broken & right).sum() >= 3 and (~broken & right).sum() >= 3


@every_breaker
@both_norms
def test_until_broken_a_sample_ignores_its_companions(attack: Attack, norm: str) -> None:
    network, x, y = case()
    draws = Draws.of(0, "test", index=torch.arange(100, 100 + len(x)))
    threat = ThreatModel(norm=norm, eps=RADII[norm])
    together = attack(Victim(network, y, until_broken=True), x, threat, draws)
    for row in torch.arange(len(x)).split(1):
        alone = Victim(network, y[row], until_broken=True)
        apart = attack(alone, x[row], threat, draws.pick(row))
        torch.testing.assert_close(apart, together[row], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "attack",
    [
        # at a checkpoint APGD goes back to its best point, which need not be the broken one
        APGD(steps=4),
        TargetedAPGD(steps=4, targets=1),
        APGD(steps=4, loss="margin"),
        Square(queries=4),
        Square(queries=4, loss="cross-entropy"),
    ],
    ids=repr,
)
@both_norms
def test_whoever_has_given_a_wrong_answer_ends_with_one(attack: Attack, norm: str) -> None:
    """Whoever gives one is asked no more, so there are as many wrong answers as broken images."""
    network = wavy(2, classes=10, seed=2, dtype=torch.float64)
    x = images((6000, 1, 1, 2), dtype=torch.float64)
    x, given = x[answers(network, 10 * x) == 0], 0

    def told(z: Tensor) -> Tensor:
        nonlocal given
        found = network(10 * z)
        given += int((found.detach().argmax(1) != 0).sum())
        return found

    y = torch.zeros(len(x), dtype=torch.int64)
    x_adv = attack(
        Victim(told, y, until_broken=True), x, ThreatModel(norm=norm, eps=RADII[norm] / 3)
    )
    assert 0 < given < len(x)
    assert wrong(network, 10 * x_adv, y).sum() == given


@every_breaker
@both_norms
def test_whoever_is_broken_is_asked_no_more(attack: Attack, norm: str) -> None:
    network, x, y = case()
    threat = ThreatModel(norm=norm, eps=RADII[norm])

    def asked(*, until_broken: bool) -> int:
        images_seen = 0

        def counted(z: Tensor) -> Tensor:
            nonlocal images_seen
            images_seen += len(z)
            return network(z)

        attack(Victim(counted, y, until_broken=until_broken), x, threat)
        return images_seen

    assert asked(until_broken=True) < asked(until_broken=False)


@pytest.mark.parametrize("attack", [FAB(steps=4, targets=3), TargetedAPGD(steps=4, targets=3)])
@both_norms
def test_a_targeted_attack_is_the_worst_of_its_rounds(attack: Targeted, norm: str) -> None:
    network, x, y = case()
    threat = ThreatModel(norm=norm, eps=RADII[norm])
    rounds = attack.rounds()
    assert [(turn.first, turn.targets) for turn in rounds] == [(1, 1), (2, 1), (3, 1)]
    victim = Victim(network, y)
    tried = torch.stack([turn(victim, x, threat) for turn in rounds])
    broken = torch.stack([wrong(network, one, y) for one in tried])
    losses = torch.stack([victim(one) for one in tried])
    worst = (losses + 1e6 * broken).argmax(0)
    together = attack(victim, x, threat)
    torch.testing.assert_close(together, tried[worst, torch.arange(len(x))], rtol=0, atol=1e-12)


ANSWERS = {
    "right, low": [5.0, 0.0, 0.0],
    "right, high": [1.0, 0.9, 0.9],
    "wrong, low": [3.0, 3.1, -9.0],
    "wrong, high": [0.0, 5.0, 0.0],
}
"""Logits of an image of class 0. The loss of "right, high" is above that of "wrong, low"."""

ATTEMPTS = [
    (["right, low", "right, high", "right, low"], 1),
    (["right, high", "right, low", "right, low"], 0),
    (["right, high", "wrong, low", "right, high"], 1),
    (["wrong, low", "right, high", "right, high"], 0),
    (["wrong, low", "right, high", "wrong, high"], 2),
    (["wrong, high", "wrong, low", "right, high"], 0),
]
"""What three attempts lead to, and which of them is the worst."""


@pytest.mark.parametrize("until_broken", [False, True])
def test_a_wrong_answer_is_worse_than_a_high_loss(until_broken: bool) -> None:
    table, names = torch.tensor(list(ANSWERS.values())), list(ANSWERS)
    asked: list[list[int]] = []

    def network(x: Tensor) -> Tensor:
        """An image is the number of its answer."""
        return table[x.flatten().long()]

    def attempt(number: int) -> Attempt:
        found = torch.tensor([float(names.index(told[number])) for told, _ in ATTEMPTS])

        def go(rows: Tensor) -> Tensor:
            asked.append(rows.tolist())
            return found[rows].reshape(-1, 1, 1, 1)

        return go

    y = torch.zeros(len(ATTEMPTS), dtype=torch.int64)
    victim = Victim(network, y, until_broken=until_broken)
    x = torch.zeros(len(ATTEMPTS), 1, 1, 1)
    worst = worst_of(victim, x, [attempt(number) for number in range(3)])
    found = [names[int(number)] for number in worst.flatten()]
    if until_broken:  # the first wrong answer is as good as any
        first = [0, 1, 2, 3, 4, 5], [0, 1, 2], [0, 1]
        assert asked == list(first)
        assert found[4] == "wrong, low"
        found[4] = "wrong, high"
    else:
        assert asked == [list(range(6))] * 3
    assert found == [told[best] for told, best in ATTEMPTS]


@pytest.mark.parametrize("attack", [FAB(steps=2, first=5), TargetedAPGD(steps=2, first=5)])
def test_without_a_class_to_aim_at_the_images_stay(attack: Attack) -> None:
    network, x, y = case()
    assert torch.equal(attack(Victim(network, y), x, ThreatModel()), x)


def test_more_targets_than_classes_are_as_many_as_there_are() -> None:
    network, x, y = case()
    four, many = (
        TargetedAPGD(steps=2, targets=targets)(Victim(network, y), x, ThreatModel(eps=0.02))
        for targets in (4, 9)
    )
    assert torch.equal(four, many)


@both_norms
def test_restarts_go_on_with_whoever_still_stands(norm: str) -> None:
    """The first restart that breaks a sample is kept, even where a later one has a higher loss."""
    network, x, y = case()
    threat, draws = (
        ThreatModel(norm=norm, eps=RADII[norm]),
        Draws.of(0, "t", index=torch.arange(16)),
    )
    victim = Victim(network, y, until_broken=True)
    attack = PGD(steps=3, restarts=3)
    first = dataclasses.replace(attack, restarts=1)(victim, x, threat, draws)
    x_adv = attack(victim, x, threat, draws)
    fell = wrong(network, first, y)
    assert torch.equal(x_adv[fell], first[fell])
    assert (wrong(network, x_adv, y) >= fell).all()


def test_a_victim_is_its_loss() -> None:
    network, x, y = case()
    torch.testing.assert_close(Victim(network, y)(x), cross_entropy(network(x), y))
    torch.testing.assert_close(Victim(network, y, margin)(x), margin(network(x), y))
    aims = (y + 2) % 5
    for aimed in (lead, targeted_dlr):
        found = Victim(network, y, aimed, targets=aims)(x)
        torch.testing.assert_close(found, aimed(network(x), y, aims))


def test_a_victim_picked_is_that_of_the_rows() -> None:
    network, x, y = case()
    rows = torch.tensor([5, 2])
    whole = Victim(network, y, lead, targets=(y + 1) % 5, until_broken=True)
    picked = whole.pick(rows)
    assert picked.until_broken
    torch.testing.assert_close(picked(x[rows]), whole(x)[rows])
    assert torch.equal(picked.see(x[rows])[1], whole.see(x)[1][rows])


def test_no_answer_is_a_wrong_answer() -> None:
    """argmax takes NaN for the highest, so at the label it would pass for right."""
    told = logits([0, 1, 0], [1, 0, 0], [math.nan, 0, 0], [0, 0, -math.inf], [3, 3, 3])
    verdict = Victim(lambda x: told, torch.tensor([1, 2, 0, 0, 0])).wrong(told)
    assert verdict.tolist() == [False, True, True, True, False]


def test_wrong_classes_come_with_the_likeliest_first() -> None:
    told = logits([0.1, 0.4, 0.3, 0.2], [9, 1, 1, 5], [1, 2, 3, 4])
    victim = Victim(lambda x: told, torch.tensor([1, 0, 3]))
    assert victim.wrong_classes(told).tolist() == [[2, 3, 0], [3, 1, 2], [2, 1, 0]]
