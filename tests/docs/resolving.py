"""A command as it would be understood, as far as that goes without data: its words by the real
parser, its recipe and settings, the names of attacks, studies, sets and baselines."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from dat.attacks.suites import split_attack, suite
from dat.cli.config import selected
from dat.cli.parser import parse
from dat.config.recipes import read
from dat.config.schema import RunConfig, parse_edits
from dat.core.files import WEIGHTS
from dat.core.threat import ThreatModel
from dat.data.catalog import CATALOG
from dat.jobs.launch import is_worker
from dat.report import check_picture
from dat.tools.bench import CommPlan, StepWorkload, Workload
from dat.tools.bench.baselines import check_baselines
from dat.tools.reproduce import THEOREM, read_study

CLASSES = 10


def resolve(words: list[str]) -> argparse.Namespace:
    """Raises whatever the command itself would raise."""
    assert not is_worker()
    arguments = parse(words)
    check = CHECKS.get(words[0], _nothing)
    check(arguments, words)
    if getattr(arguments, "plot", None):
        check_picture(arguments.plot)
    return arguments


def _recipe(arguments: argparse.Namespace, words: list[str]) -> None:
    if words[0] == "train" and arguments.resume:
        assert all(it.startswith("comm.") for it in (arguments.recipe, *arguments.settings) if it)
        return
    assert arguments.recipe, "train: no recipe"
    settle(arguments.recipe, arguments.settings)
    if words[0] == "selftrain":
        settle(arguments.recipe, [*arguments.settings, *arguments.base])


def settle(recipe: str, settings: list[str]) -> RunConfig:
    """A file of the reader's is taken to say nothing of its own."""
    return read("digits" if recipe.endswith(".yaml") else recipe, parse_edits(settings))


def _config(arguments: argparse.Namespace, words: list[str]) -> None:
    edits = [word for word in arguments.settings if "=" in word]
    config = settle(arguments.recipe, edits)
    assert selected(config, [word for word in arguments.settings if "=" not in word])


def _finetune(arguments: argparse.Namespace, words: list[str]) -> None:
    assert len(arguments.runs) == (1 if arguments.model else 2), "finetune: a run and a recipe"
    settle(str(arguments.runs[-1]), arguments.settings)
    _weights(arguments)


def _measured(arguments: argparse.Namespace, words: list[str]) -> None:
    settle("digits", arguments.settings)
    for name in (getattr(arguments, "attacks", None) or "clean").split(","):
        assert name == "clean" or suite(name, CLASSES)
    if words[0] != "sweep":
        assert len(arguments.runs) == (0 if getattr(arguments, "model", None) else 1)
        _weights(arguments)
        return
    split_attack(arguments.attack)
    assert arguments.runs and all(ThreatModel.read({"eps": it}) for it in arguments.eps or ())


def _weights(arguments: argparse.Namespace) -> None:
    if arguments.weights:
        assert arguments.weights in WEIGHTS or "." in arguments.weights, arguments.weights


def _study(arguments: argparse.Namespace, words: list[str]) -> None:
    if arguments.study not in (None, THEOREM):
        read_study(arguments.study, arguments.scale)


def _data(arguments: argparse.Namespace, words: list[str]) -> None:
    if words[1] == "fetch":
        assert arguments.name in CATALOG, arguments.name
    if words[1] == "shard":
        assert arguments.by in ("random", "class", "dirichlet")


def _bench(arguments: argparse.Namespace, words: list[str]) -> None:
    taken = vars(arguments)
    workloads: dict[str, type[Any]] = {
        "attack": Workload,
        "step": StepWorkload,
        "comm": CommPlan,
    }
    known = workloads.get(words[1])
    if known is not None:
        names = {field.name for field in dataclasses.fields(known)} & taken.keys()
        known(**{name: taken[name] for name in names})
    if "against" in taken:
        check_baselines(words[1], arguments.against)


def _nothing(arguments: argparse.Namespace, words: list[str]) -> None:
    pass


CHECKS: dict[str, Callable[[argparse.Namespace, list[str]], None]] = {
    **dict.fromkeys(("train", "profile", "selftrain", "launch"), _recipe),
    **dict.fromkeys(("evaluate", "sweep", "certify", "label"), _measured),
    "config": _config,
    "finetune": _finetune,
    "reproduce": _study,
    "data": _data,
    "bench": _bench,
}
