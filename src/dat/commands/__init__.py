"""The commands, each a thin call into one function; torch is imported only when there is work.

A group of commands is one file, with their arguments and what they do, and one line below.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dat.commands import (
    bench,
    data,
    exporting,
    helping,
    launching,
    measuring,
    planning,
    profiling,
    reproducing,
    showing,
    training,
)
from dat.commands.arguments import Commands, teach

GROUPS = (
    *(training, launching, measuring, exporting, showing, reproducing, data, profiling, planning),
    bench,
    helping,
)

ABOUT = """\
Train image classifiers that withstand adversarial attack, on one machine or on many.

  dat train digits --workers 2                          a robust digit classifier, in a minute
  dat train digits attack.steps=5 optimizer.name=lars   the same with other settings
  dat train my.yaml --out runs/mine                     a recipe of your own
  torchrun --nnodes 6 --nproc-per-node 6 ... -m dat train RECIPE      the same on a cluster
"""


def parse(words: list[str]) -> argparse.Namespace:
    """The arguments, with the command as `run`.

    argparse stops filling a list at the first option; the rest is taken as well.
    """
    whole = parser()
    arguments, rest = whole.parse_known_args(words)
    options = [word for word in rest if word.startswith("-")]
    if options:
        whole.error(f"unknown option {options[0]}: see dat {words[0]} --help")
    if hasattr(arguments, "mixed"):
        _sort_out(arguments, rest)
    elif hasattr(arguments, "settings"):
        arguments.settings = [*arguments.settings, *rest]
    elif rest:
        whole.error(f"{rest[0]}: not expected here; see dat {words[0]} --help")
    return arguments


def _sort_out(arguments: argparse.Namespace, rest: list[str]) -> None:
    """Runs and settings may come in any order: a setting has an equals sign, and is no folder."""
    arguments.runs, arguments.settings = [], []
    for word in (*arguments.mixed, *rest):
        if "=" in word and not Path(word).is_dir():
            arguments.settings.append(word)
        else:
            arguments.runs.append(Path(word))


def parser() -> argparse.ArgumentParser:
    """All commands with all their options."""
    whole = teach(argparse.ArgumentParser(prog="dat", allow_abbrev=False), ABOUT, "")
    commands = Commands(whole.add_subparsers(metavar="COMMAND", required=True))
    for group in GROUPS:
        group.add(commands)
    return whole
