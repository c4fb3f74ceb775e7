"""Attack targets: losses, early stopping, and that broken images are misclassified."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import dat
from dat.attacks import APGD, FAB, PGD, Attack, AttackTarget, Square, Targeted, TargetedAPGD
from dat.attacks.base import Attempt, worst_of
from dat.core.losses import cross_entropy, margin, targeted_dlr, targeted_margin
from dat.core.rng import Streams
from dat.core.threat import ThreatModel
from tests.attacks.cases import Network, answers, both_norms, images, wavy, wrong

BREAKERS = [
    APGD(steps=12),
    APGD(steps=12, loss="dlr"),
    TargetedAPGD(steps=6, targets=3),
    FAB(steps=6, targets=3),
    Square(queries=40),
    PGD(steps=3, restarts=3),
]
"""Attacks that stop at a misclassified image: within an attempt, or between two."""
RADII = {"linf": 0.03, "l2": 0.12}
"""Radii at which some of the images below are misclassified, early or late, and some never."""

every_breaker = pytest.mark.parametrize("attack", BREAKERS, ids=repr)


def logits(*rows: list[float]) -> Tensor:
    return torch.tensor(rows)


def case() -> tuple[Network, Tensor, Tensor]:
    """A network, images, and labels, two of them wrong."""
    x = images((16, 1, 4, 4), dtype=torch.float64)
    network = wavy(16, dtype=torch.float64)
    y = answers(network, x)
    y[[3, 8]] = (y[[3, 8]] + 1) % 5
    return network, x, y


@every_breaker
@both_norms
def test_broken_images_are_in_ball_and_box_and_misclassified(attack: Attack, norm: str) -> None:
    network, x, y = case()
    threat = ThreatModel(norm=norm, eps=RADII[norm])
    x_adv = attack(AttackTarget(network, y, until_broken=True), x, threat)
    assert (threat.size(x_adv, x) <= threat.eps + 1e-9).all()
    assert x_adv.min() >= 0 and x_adv.max() <= 1
    broken = wrong(network, x_adv, y)
    right = ~wrong(network, x, y)
    assert (broken & right).sum() >= 3 and (~broken & right).sum() >= 3


@every_breaker
@both_norms
def test_until_broken_samples_are_independent(attack: Attack, norm: str) -> None:
    network, x, y = case()
    draws = Streams.of(0, "test", index=torch.arange(100, 100 + len(x)))
    threat = ThreatModel(norm=norm, eps=RADII[norm])
    together = attack(AttackTarget(network, y, until_broken=True), x, threat, draws)
    for row in torch.arange(len(x)).split(1):
        alone = AttackTarget(network, y[row], until_broken=True)
        apart = attack(alone, x[row], threat, draws.select(row))
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
def test_an_image_that_was_misclassified_ends_up_misclassified(attack: Attack, norm: str) -> None:
    """A misclassified image is dropped, so there is one wrong answer per broken image."""
    network = wavy(2, classes=10, seed=2, dtype=torch.float64)
    x = images((6000, 1, 1, 2), dtype=torch.float64)
    x, wrong_answers = x[answers(network, 10 * x) == 0], 0

    def counted(z: Tensor) -> Tensor:
        nonlocal wrong_answers
        output = network(10 * z)
        wrong_answers += int((output.detach().argmax(1) != 0).sum())
        return output

    y = torch.zeros(len(x), dtype=torch.int64)
    x_adv = attack(
        AttackTarget(counted, y, until_broken=True), x, ThreatModel(norm=norm, eps=RADII[norm] / 3)
    )
    assert 0 < wrong_answers < len(x)
    assert wrong(network, 10 * x_adv, y).sum() == wrong_answers


@every_breaker
@both_norms
def test_broken_images_are_dropped(attack: Attack, norm: str) -> None:
    network, x, y = case()
    threat = ThreatModel(norm=norm, eps=RADII[norm])

    def asked(*, until_broken: bool) -> int:
        images_seen = 0

        def counted(z: Tensor) -> Tensor:
            nonlocal images_seen
            images_seen += len(z)
            return network(z)

        attack(AttackTarget(counted, y, until_broken=until_broken), x, threat)
        return images_seen

    assert asked(until_broken=True) < asked(until_broken=False)


@pytest.mark.parametrize("attack", [FAB(steps=4, targets=3), TargetedAPGD(steps=4, targets=3)])
@both_norms
def test_a_targeted_attack_is_the_worst_of_its_rounds(attack: Targeted, norm: str) -> None:
    network, x, y = case()
    threat = ThreatModel(norm=norm, eps=RADII[norm])
    rounds = attack.rounds()
    assert [(part.first, part.targets) for part in rounds] == [(1, 1), (2, 1), (3, 1)]
    target = AttackTarget(network, y)
    tried = torch.stack([part(target, x, threat) for part in rounds])
    broken = torch.stack([wrong(network, one, y) for one in tried])
    losses = torch.stack([target(one) for one in tried])
    worst = (losses + 1e6 * broken).argmax(0)
    together = attack(target, x, threat)
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
"""The outcomes of three attempts, and the index of the worst."""


@pytest.mark.parametrize("until_broken", [False, True])
def test_a_wrong_answer_is_worse_than_a_high_loss(until_broken: bool) -> None:
    table, names = torch.tensor(list(ANSWERS.values())), list(ANSWERS)
    asked: list[list[int]] = []

    def network(x: Tensor) -> Tensor:
        """The pixel of an image is the index of its answer."""
        return table[x.flatten().long()]

    def attempt(number: int) -> Attempt:
        numbers = torch.tensor([float(names.index(outcomes[number])) for outcomes, _ in ATTEMPTS])

        def go(rows: Tensor) -> Tensor:
            asked.append(rows.tolist())
            return numbers[rows].reshape(-1, 1, 1, 1)

        return go

    y = torch.zeros(len(ATTEMPTS), dtype=torch.int64)
    target = AttackTarget(network, y, until_broken=until_broken)
    x = torch.zeros(len(ATTEMPTS), 1, 1, 1)
    worst = worst_of(target, x, [attempt(number) for number in range(3)])
    results = [names[int(number)] for number in worst.flatten()]
    if until_broken:  # the first wrong answer is as good as any
        first = [0, 1, 2, 3, 4, 5], [0, 1, 2], [0, 1]
        assert asked == list(first)
        assert results[4] == "wrong, low"
        results[4] = "wrong, high"
    else:
        assert asked == [list(range(6))] * 3
    assert results == [outcomes[best] for outcomes, best in ATTEMPTS]


@pytest.mark.parametrize("attack", [FAB(steps=2, first=5), TargetedAPGD(steps=2, first=5)])
def test_without_a_target_class_the_images_are_unchanged(attack: Attack) -> None:
    network, x, y = case()
    assert torch.equal(attack(AttackTarget(network, y), x, ThreatModel()), x)


def test_more_targets_than_wrong_classes_are_all_of_them() -> None:
    network, x, y = case()
    four, nine = (
        TargetedAPGD(steps=2, targets=targets)(AttackTarget(network, y), x, ThreatModel(eps=0.02))
        for targets in (4, 9)
    )
    assert torch.equal(four, nine)


@both_norms
def test_restarts_continue_with_the_remaining_images(norm: str) -> None:
    """The first restart that succeeds is kept, even if a later one has a higher loss."""
    network, x, y = case()
    threat, draws = (
        ThreatModel(norm=norm, eps=RADII[norm]),
        Streams.of(0, "t", index=torch.arange(16)),
    )
    target = AttackTarget(network, y, until_broken=True)
    attack = PGD(steps=3, restarts=3)
    first = dataclasses.replace(attack, restarts=1)(target, x, threat, draws)
    x_adv = attack(target, x, threat, draws)
    fell = wrong(network, first, y)
    assert torch.equal(x_adv[fell], first[fell])
    assert (wrong(network, x_adv, y) >= fell).all()


def test_a_target_is_its_loss() -> None:
    network, x, y = case()
    torch.testing.assert_close(AttackTarget(network, y)(x), cross_entropy(network(x), y))
    torch.testing.assert_close(AttackTarget(network, y, margin)(x), margin(network(x), y))
    targets = (y + 2) % 5
    for targeted_loss in (targeted_margin, targeted_dlr):
        losses = AttackTarget(network, y, targeted_loss, targets=targets)(x)
        torch.testing.assert_close(losses, targeted_loss(network(x), y, targets))


def test_selected_rows_of_a_target() -> None:
    network, x, y = case()
    rows = torch.tensor([5, 2])
    full = AttackTarget(network, y, targeted_margin, targets=(y + 1) % 5, until_broken=True)
    selected = full.select(rows)
    assert selected.until_broken
    torch.testing.assert_close(selected(x[rows]), full(x)[rows])
    assert torch.equal(selected.forward(x[rows])[1], full.forward(x)[1][rows])


def test_no_answer_is_a_wrong_answer() -> None:
    """argmax treats NaN as the maximum, so at the label it would count as correct."""
    outputs = logits([0, 1, 0], [1, 0, 0], [math.nan, 0, 0], [0, 0, -math.inf], [3, 3, 3])
    verdict = AttackTarget(lambda x: outputs, torch.tensor([1, 2, 0, 0, 0])).misclassified(outputs)
    assert verdict.tolist() == [False, True, True, True, False]


def test_wrong_classes_are_sorted_by_likelihood() -> None:
    outputs = logits([0.1, 0.4, 0.3, 0.2], [9, 1, 1, 5], [1, 2, 3, 4])
    target = AttackTarget(lambda x: outputs, torch.tensor([1, 0, 3]))
    assert target.wrong_classes(outputs).tolist() == [[2, 3, 0], [3, 1, 2], [2, 1, 0]]


def test_the_old_names_still_work_with_a_warning() -> None:
    message = r"dat\.Victim is deprecated, use dat\.AttackTarget$"
    with pytest.warns(DeprecationWarning, match=message) as raised:
        assert dat.Victim is AttackTarget  # type: ignore[attr-defined]
    assert raised[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=r"use dat\.attacks\.AttackTarget"):
        from dat.attacks import Victim  # type: ignore[attr-defined]
    assert Victim is AttackTarget
    assert "Victim" not in dat.__all__ and "Victim" not in dir(dat)
    network, x, y = case()
    target = AttackTarget(network, y)
    with pytest.warns(DeprecationWarning, match=r"use AttackTarget\.forward"):
        losses, _ = target.see(x)
    assert torch.equal(losses, target(x))
    with pytest.warns(DeprecationWarning, match=r"use AttackTarget\.misclassified"):
        wrong_images = target.wrong(network(x))
    assert torch.equal(wrong_images, wrong(network, x, y))
