"""Attacks by name, for evaluation: `pgd-20`, `cw-100x5`, `apgd-t`, `apgd-ce+square`,
`autoattack`, ..."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dat.attacks.apgd import APGD, TargetedAPGD
from dat.attacks.base import Attack
from dat.attacks.fab import FAB
from dat.attacks.fgsm import FGSM
from dat.attacks.none import NoAttack
from dat.attacks.pgd import PGD
from dat.attacks.square import Square
from dat.core.settings import did_you_mean

CLEAN = "clean"
AUTOATTACK = "autoattack"
JOINED = "+"
"""Between the names of attacks that form a suite."""
TARGETS = 9
RAND_EOT = 20


class Round(NamedTuple):
    """One attack on the images that are still correctly classified."""

    name: str
    attack: Attack
    turn: int = 0
    """The index of the round among those of the same name."""


class Suite(NamedTuple):
    """Attacks that run one after the other, each on the images that withstood the previous ones;
    cheap ones come first."""

    name: str
    rounds: tuple[Round, ...]

    @property
    def attacks(self) -> tuple[str, ...]:
        """The names of the attacks, in order."""
        return attack_names(self.rounds)


def attack_names(rounds: Sequence[Round]) -> tuple[str, ...]:
    """The distinct names of the rounds, in order."""
    return tuple(dict.fromkeys(attack_round.name for attack_round in rounds))


def suite(name: str, classes: int = 10) -> Suite:
    """The suite called `name`, for a network with this number of classes."""
    if name in SUITES:
        return suite_of(name, SUITES[name](classes))
    parts = name.split(JOINED)
    if len({*parts}) < len(parts):
        raise ValueError(f"attack {name!r}: names an attack twice")
    return suite_of(name, {part: attack_named(part, classes) for part in parts})


def attack_named(name: str, classes: int = 10) -> Attack:
    """The single attack called `name`, for a network with this number of classes."""
    word, steps, restarts = _parse(name)
    if word in STEPPED:
        if word == "pgd-dlr" and classes < 3:
            raise ValueError("pgd-dlr: needs three classes or more; use cw")
        return STEPPED[word](steps or 20, restarts or 1)
    if word in SINGLE and restarts is None and not (word == "fgsm" and steps):
        return SINGLE[word](classes, steps)
    raise ValueError(f"attack {name!r}: unknown{did_you_mean(name, names())}")


def subset_of(name: str, attacks: Sequence[str], classes: int = 10) -> Suite:
    """These attacks of a suite, in this order, with the same random numbers."""
    full = suite(name, classes)
    unknown = [attack for attack in attacks if attack not in full.attacks]
    if unknown:
        near = did_you_mean(unknown[0], full.attacks)
        few = f" with {classes} classes" if classes < 4 else ""
        raise ValueError(f"attacks: {unknown[0]!r} is not in {name}{few}{near}")
    if not attacks or len({*attacks}) < len(attacks):
        raise ValueError(f"attacks = {[*attacks]}: must be at least one, and none twice")
    rounds = [turn for attack in attacks for turn in full.rounds if turn.name == attack]
    return full if tuple(rounds) == full.rounds else Suite(JOINED.join(attacks), tuple(rounds))


def suite_of(name: str, attacks: dict[str, Attack], times: int = 1) -> Suite:
    """A suite of named attacks, each repeated `times` times."""
    rounds = [
        Round(word, part, turn)
        for word, attack in attacks.items()
        for turn, part in enumerate([*attack.rounds()] * times)
    ]
    return Suite(name, tuple(rounds))


def clean() -> Suite:
    """The suite without an attack, which finds the images that are misclassified anyway."""
    return Suite(CLEAN, (Round(CLEAN, NoAttack()),))


def _parse(name: str) -> tuple[str, int | None, int | None]:
    """`pgd-100x5`: the attack, its steps, its restarts."""
    match = re.fullmatch(r"(?P<word>[a-z-]*?[a-z])(-(?P<steps>\d+)(x(?P<restarts>\d+))?)?", name)
    if match is None:
        return name, None, None
    steps, restarts = match["steps"], match["restarts"]
    if any(count is not None and int(count) == 0 for count in (steps, restarts)):
        raise ValueError(f"attack {name!r}: steps and restarts must be at least 1")
    return match["word"], int(steps) if steps else None, int(restarts) if restarts else None


def _standard(classes: int) -> dict[str, Attack]:
    """AutoAttack as published. The targeted DLR loss needs four classes; FAB-T has one boundary per
    wrong class."""
    targets = min(TARGETS, classes - 1)
    second: dict[str, Attack] = {"apgd-t": TargetedAPGD(targets=targets)}
    if classes < 4:
        second = {"apgd-margin": APGD(loss="margin")}
    return {"apgd-ce": APGD(), **second, "fab-t": FAB(targets=targets), "square": Square()}


def _randomized(classes: int) -> dict[str, Attack]:
    """The version for randomized networks, with gradients averaged over several passes."""
    other = "dlr" if classes > 2 else "margin"
    return {
        "apgd-ce": APGD(eot=RAND_EOT),
        f"apgd-{other}": APGD(loss=other, eot=RAND_EOT),
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
    """The original of Goodfellow et al. 2015: a step of eps from the image itself."""
    return FGSM(step_ratio=1.0, random_start=False)


def _square(classes: int, queries: int | None) -> Attack:
    return Square(queries=queries or 5000)


def _pgd(loss: str) -> Callable[[int, int], Attack]:
    return lambda steps, restarts: PGD(steps=steps, restarts=restarts, loss=loss)


SUITES: dict[str, Callable[[int], dict[str, Attack]]] = {
    CLEAN: lambda classes: {},
    AUTOATTACK: _standard,
    f"{AUTOATTACK}-rand": _randomized,
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
    """The known names, those with steps as examples."""
    return (*SUITES, *SINGLE, *(f"{word}-20" for word in STEPPED))


def split_attack(name: str) -> tuple[str, int]:
    """Split `pgd-20` into an attack and its number of steps."""
    word, _, count = name.rpartition("-")
    if not count.isdigit() or int(count) < 1:
        raise ValueError(f"--attack {name}: must be an attack with its steps, e.g. pgd-20, cw-50")
    suite(name)
    return word, int(count)
