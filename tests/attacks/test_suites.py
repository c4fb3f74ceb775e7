"""Attacks by name."""

from __future__ import annotations

import pytest
import torch

from dat.attacks import APGD, FAB, FGSM, PGD, Attack, AttackTarget, NoAttack, Square, TargetedAPGD
from dat.attacks.suites import Suite, clean, names, suite, suite_of
from dat.core.threat import ThreatModel

SINGLE: dict[str, Attack] = {
    "pgd": PGD(steps=20),
    "pgd-1": PGD(steps=1),
    "pgd-20": PGD(steps=20),
    "cw-20": PGD(steps=20, loss="margin"),
    "pgd-dlr-20": PGD(steps=20, loss="dlr"),
    "fgsm": FGSM(step_ratio=1.0, random_start=False),
    "apgd-ce": APGD(steps=100),
    "apgd-ce-20": APGD(steps=20),
    "apgd-dlr": APGD(steps=100, loss="dlr"),
    "apgd-margin-7": APGD(steps=7, loss="margin"),
    "square": Square(queries=5000),
    "square-500": Square(queries=500),
}
"""Attacks of one round."""
TARGETED: dict[str, type[TargetedAPGD] | type[FAB]] = {"apgd-t": TargetedAPGD, "fab-t": FAB}


def attacks(chosen: Suite, name: str) -> list[Attack]:
    return [part.attack for part in chosen.rounds if part.name == name]


@pytest.mark.parametrize("name", SINGLE)
def test_a_name_is_an_attack(name: str) -> None:
    chosen = suite(name, 10)
    assert chosen.name == name
    assert chosen.attacks == (name,)
    assert [(part.name, part.attack, part.turn) for part in chosen.rounds] == [
        (name, SINGLE[name], 0)
    ]


@pytest.mark.parametrize(("name", "loss"), [("pgd-100x5", "given"), ("cw-100x5", "margin")])
def test_restarts_are_rounds_of_their_own(name: str, loss: str) -> None:
    chosen = suite(name, 10)
    assert attacks(chosen, name) == [PGD(steps=100, loss=loss)] * 5
    assert [part.turn for part in chosen.rounds] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", TARGETED)
@pytest.mark.parametrize("steps", [None, 30])
def test_targets_are_rounds_of_their_own(name: str, steps: int | None) -> None:
    """The most likely wrong class comes first, and misclassified images skip the others."""
    full = name if steps is None else f"{name}-{steps}"
    chosen = suite(full, 10)
    kind, count = TARGETED[name], 100 if steps is None else steps
    expected = [kind(first=rank, targets=1, steps=count) for rank in range(1, 10)]
    assert attacks(chosen, full) == expected
    assert [part.turn for part in chosen.rounds] == list(range(9))


def test_autoattack_is_the_published_one() -> None:
    """Croce & Hein 2020: 100 steps, nine targets, 5,000 queries, in this order."""
    chosen = suite("autoattack", 10)
    assert chosen.attacks == ("apgd-ce", "apgd-t", "fab-t", "square")
    assert attacks(chosen, "apgd-ce") == [APGD(steps=100, loss="given", eot=1)]
    ranks = range(1, 10)
    aimed = [TargetedAPGD(first=rank, targets=1, steps=100, eot=1) for rank in ranks]
    assert attacks(chosen, "apgd-t") == aimed
    settings = {"steps": 100, "overshoot": 1.05, "pull": 0.1, "retreat": 0.9}
    near = [FAB.read({"first": rank, "targets": 1, **settings}) for rank in ranks]
    assert attacks(chosen, "fab-t") == near
    assert attacks(chosen, "square") == [Square(queries=5000, share=0.8, loss="margin")]
    assert len(chosen.rounds) == 20


def test_the_random_version_averages_gradients() -> None:
    chosen = suite("autoattack-rand", 10)
    assert chosen.attacks == ("apgd-ce", "apgd-dlr")
    assert attacks(chosen, "apgd-ce") == [APGD(steps=100, eot=20)]
    assert attacks(chosen, "apgd-dlr") == [APGD(steps=100, loss="dlr", eot=20)]


@pytest.mark.parametrize(("classes", "targets"), [(4, 3), (5, 4), (10, 9), (100, 9)])
def test_no_more_targets_than_wrong_classes(classes: int, targets: int) -> None:
    for name in TARGETED:
        assert len(suite(name, classes).rounds) == targets
    chosen = suite("autoattack", classes)
    assert chosen.attacks == ("apgd-ce", "apgd-t", "fab-t", "square")
    for name in TARGETED:
        assert len(attacks(chosen, name)) == targets


@pytest.mark.parametrize("classes", [2, 3])
def test_few_classes_have_no_targeted_dlr_loss(classes: int) -> None:
    """It needs four logits; the margin replaces it."""
    chosen = suite("autoattack", classes)
    assert chosen.attacks == ("apgd-ce", "apgd-margin", "fab-t", "square")
    assert attacks(chosen, "apgd-margin") == [APGD(steps=100, loss="margin")]
    assert len(attacks(chosen, "fab-t")) == classes - 1
    random = suite("autoattack-rand", classes)
    assert random.attacks == ("apgd-ce", "apgd-dlr" if classes == 3 else "apgd-margin")


ALL = (*SINGLE, *TARGETED, "autoattack", "autoattack-rand")
REFUSED = (("apgd-dlr", 2), ("pgd-dlr-20", 2), ("apgd-t", 2), ("apgd-t", 3))
"""The DLR loss needs three logits, the targeted one four."""
POSSIBLE = [
    (name, count) for name in ALL for count in (2, 3, 4, 10) if (name, count) not in REFUSED
]


@pytest.mark.parametrize(("name", "classes"), POSSIBLE)
def test_attacks_fit_the_number_of_classes(name: str, classes: int) -> None:
    weights = torch.randn(4, classes, generator=torch.Generator().manual_seed(0))
    x = torch.full((2, 1, 2, 2), 0.5)
    target = AttackTarget(lambda images: images.flatten(1) @ weights, torch.tensor([0, 1]))
    for part in suite(name, classes).rounds:
        quick = {key: 1 for key in ("steps", "queries", "eot") if hasattr(part.attack, key)}
        attack = type(part.attack).read(part.attack.dump() | quick)
        assert attack(target, x, ThreatModel(eps=0.1)).shape == x.shape


@pytest.mark.parametrize(("name", "classes"), REFUSED)
def test_losses_that_need_more_classes_are_refused(name: str, classes: int) -> None:
    with pytest.raises(ValueError, match="classes or more; use "):
        suite(name, classes)


UNKNOWN = {
    "pgd20": "did you mean pgd-20?",
    "pgd-20x": "did you mean pgd-20?",
    "autoatack": "did you mean autoattack?",
    "auto-attack": "did you mean autoattack?",
    "autoattack-20": "did you mean autoattack?",
    "apgd-cee": "did you mean apgd-ce?",
    "apgdt": "did you mean apgd-t?",
    "fab": "did you mean fab-t?",
    "squares": "did you mean square?",
    "square-500x2": "did you mean square?",
    "apgd-ce-20x5": "did you mean apgd-ce?",
    "fgsm-20": "did you mean fgsm?",
    "clean-2": "did you mean clean?",
    "deepfool": "choose from apgd-ce, ",
    "": "choose from apgd-ce, ",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_names_get_a_suggestion(name: str) -> None:
    with pytest.raises(ValueError, match=f"^attack '{name}': unknown: ") as raised:
        suite(name, 10)
    assert UNKNOWN[name] in str(raised.value)


def test_what_is_known_is_listed_once() -> None:
    with pytest.raises(ValueError, match="choose from") as raised:
        suite("deepfool", 10)
    listed = str(raised.value).partition("choose from ")[2].split(", ")
    assert listed == sorted(set(names()))


@pytest.mark.parametrize("name", ["pgd-0", "pgd-20x0", "square-0", "apgd-ce-00", "square-00"])
def test_no_steps_and_no_restarts_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        suite(name, 10)


@pytest.mark.parametrize("name", names())
def test_the_names_on_offer_are_known(name: str) -> None:
    assert suite(name, 10).name == name


def test_clean_is_no_attack() -> None:
    assert suite("clean", 10).rounds == ()
    assert [part.attack for part in clean().rounds] == [NoAttack()]


def test_custom_attacks_make_a_suite() -> None:
    """Repetitions are restarts, and every round has its own random numbers."""
    chosen = suite_of("mine", {"a": PGD(steps=3, restarts=2), "b": FGSM()}, 2)
    assert chosen.name == "mine"
    assert chosen.attacks == ("a", "b")
    assert [(part.name, part.turn) for part in chosen.rounds] == [
        *(("a", number) for number in range(4)),
        *(("b", number) for number in range(2)),
    ]
    assert attacks(chosen, "a") == [PGD(steps=3)] * 4
    assert attacks(chosen, "b") == [FGSM()] * 2


def test_names_joined_by_plus_are_a_suite_in_that_order() -> None:
    chosen = suite("square-7+apgd-ce", 10)
    assert chosen.attacks == ("square-7", "apgd-ce")
    assert [part.attack for part in chosen.rounds] == [Square(queries=7), APGD()]
    assert len(suite("apgd-ce+apgd-t", 10).rounds) == 10


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("square+square", "attack 'square[+]square': names an attack twice"),
        ("square+pdg-20", "attack 'pdg-20': unknown: did you mean pgd-20"),
        ("square+", "attack '': unknown"),
        ("autoattack+square", "attack 'autoattack': unknown"),
    ],
)
def test_wrong_names_in_a_joined_suite(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        suite(name, 10)
