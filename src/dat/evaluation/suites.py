"""Attacks by name, for evaluation: `pgd-20`, `cw-100x5`, `apgd-t`, `autoattack`, ..."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dat.attacks import APGD, FAB, FGSM, PGD, Attack, NoAttack, Square, TargetedAPGD
from dat.fields import did_you_mean

CLEAN = "clean"
AUTOATTACK = "autoattack"
TARGETS = 9
RAND_DRAWS = 20


class Round(NamedTuple):
    """One attack on whoever is still standing."""

    name: str
    attack: Attack
    turn: int = 0
    """Which of the rounds of that name."""


class Suite(NamedTuple):
    """Attacks that an image must survive, one after the other, the cheap ones first."""

    name: str
    rounds: tuple[Round, ...]

    @property
    def attacks(self) -> tuple[str, ...]:
        """The names of its attacks, in order."""
        return attack_names(self.rounds)


def attack_names(rounds: Sequence[Round]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(turn.name for turn in rounds))


def suite(name: str, classes: int) -> Suite:
    """What a name stands for, against a network of so many classes."""
    word, steps, restarts = _parts(name)
    if word in SUITES and steps is None and restarts is None:
        members = SUITES[word](classes)
    elif word in STEPPED:
        if word == "pgd-dlr" and classes < 3:
            raise ValueError("pgd-dlr: needs three classes or more; use cw")
        members = {name: STEPPED[word](steps or 20, restarts or 1)}
    elif word in SINGLE and restarts is None and not (word == "fgsm" and steps):
        members = {name: SINGLE[word](classes, steps)}
    else:
        raise ValueError(f"attack {name!r}: unknown{did_you_mean(name, names())}")
    return suite_of(name, members)


def suite_of(name: str, members: dict[str, Attack], times: int = 1) -> Suite:
    """Named attacks as one suite, each so many times."""
    rounds = [
        Round(word, attack, turn)
        for word, member in members.items()
        for turn, attack in enumerate([*member.rounds()] * times)
    ]
    return Suite(name, tuple(rounds))


def clean() -> Suite:
    """The attack that changes nothing: whoever falls to it was wrong before."""
    return Suite(CLEAN, (Round(CLEAN, NoAttack()),))


def _parts(name: str) -> tuple[str, int | None, int | None]:
    """`pgd-100x5`: the attack, its steps, its restarts."""
    match = re.fullmatch(r"(?P<word>[a-z-]*?[a-z])(-(?P<steps>\d+)(x(?P<restarts>\d+))?)?", name)
    if match is None:
        return name, None, None
    steps, restarts = match["steps"], match["restarts"]
    if any(count is not None and int(count) == 0 for count in (steps, restarts)):
        raise ValueError(f"attack {name!r}: steps and restarts must be at least 1")
    return match["word"], int(steps) if steps else None, int(restarts) if restarts else None


def _standard(classes: int) -> dict[str, Attack]:
    """AutoAttack as published. The targeted DLR loss needs four classes, FAB-T has one boundary for
    each wrong class."""
    targets = min(TARGETS, classes - 1)
    aimed: dict[str, Attack] = {"apgd-t": TargetedAPGD(targets=targets)}
    if classes < 4:
        aimed = {"apgd-margin": APGD(loss="margin")}
    return {"apgd-ce": APGD(), **aimed, "fab-t": FAB(targets=targets), "square": Square()}


def _random(classes: int) -> dict[str, Attack]:
    """The version for networks that answer at random: gradients averaged over draws."""
    other = "dlr" if classes > 2 else "margin"
    return {
        "apgd-ce": APGD(eot=RAND_DRAWS),
        f"apgd-{other}": APGD(loss=other, eot=RAND_DRAWS),
    }


def _apgd(loss: str) -> Callable[[int, int | None], Attack]:
    def make(classes: int, steps: int | None) -> Attack:
        if loss == "dlr" and classes < 3:
            raise ValueError("apgd-dlr: needs three classes or more; use apgd-margin")
        return APGD(loss=loss, steps=steps or 100)

    return make


def _apgd_t(classes: int, steps: int | None) -> Attack:
    if classes < 4:
        raise ValueError("apgd-t: needs four classes or more; use apgd-margin")
    return TargetedAPGD(targets=min(TARGETS, classes - 1), steps=steps or 100)


def _fab_t(classes: int, steps: int | None) -> Attack:
    return FAB(targets=min(TARGETS, classes - 1), steps=steps or 100)


def _fgsm(classes: int, steps: int | None) -> Attack:
    """The plain one of Goodfellow et al. 2015: a step of eps from the image itself."""
    return FGSM(step_ratio=1.0, random_start=False)


def _square(classes: int, queries: int | None) -> Attack:
    return Square(queries=queries or 5000)


def _pgd(loss: str) -> Callable[[int, int], Attack]:
    return lambda steps, restarts: PGD(steps=steps, restarts=restarts, loss=loss)


SUITES: dict[str, Callable[[int], dict[str, Attack]]] = {
    CLEAN: lambda classes: {},
    AUTOATTACK: _standard,
    f"{AUTOATTACK}-rand": _random,
}
SINGLE: dict[str, Callable[[int, int | None], Attack]] = {
    "apgd-ce": _apgd("given"),
    "apgd-dlr": _apgd("dlr"),
    "apgd-margin": _apgd("margin"),
    "apgd-t": _apgd_t,
    "fab-t": _fab_t,
    "fgsm": _fgsm,
    "square": _square,
}
STEPPED: dict[str, Callable[[int, int], Attack]] = {
    "pgd": _pgd("given"),
    "cw": _pgd("margin"),
    "pgd-dlr": _pgd("dlr"),
}


def names() -> Sequence[str]:
    """What can be asked for, as examples."""
    return (*SUITES, *SINGLE, *(f"{word}-20" for word in STEPPED))
