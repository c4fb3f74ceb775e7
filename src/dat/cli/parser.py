"""The parser of all commands. Each command is a module of its own; none imports torch to parse."""

from __future__ import annotations

import argparse
from pathlib import Path

from dat.cli import (
    bench,
    certify,
    compare,
    completion,
    config,
    data,
    doctor,
    evaluate,
    export,
    finetune,
    label,
    launch,
    new,
    plan,
    profile,
    recipes,
    report,
    reproduce,
    selftest,
    selftrain,
    sweep,
    train,
    verify,
)
from dat.cli.arguments import Commands, describe

COMMANDS = (
    *(train, finetune, label, selftrain, launch),
    *(evaluate, verify, sweep, certify, export),
    *(compare, report, recipes, config, reproduce),
    *(data, profile, plan, bench),
    *(new, doctor, selftest, completion),
)
"""In the order of `dat --help`."""

ABOUT = """\
Train adversarially robust image classifiers, on one machine or many.

  dat train digits --workers 2                          a robust digit classifier in a minute
  dat train digits attack.steps=5 optimizer.name=lars   override settings of the recipe
  dat train my.yaml --out runs/mine                     train from your own recipe
  torchrun --nnodes 6 --nproc-per-node 6 ... -m dat train RECIPE      train on a cluster
"""


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse a command line; `run` is the command's function.

    argparse stops filling a list of values at the first option; the values after it are added here.
    """
    dat = parser()
    arguments, rest = dat.parse_known_args(argv)
    options = [word for word in rest if word.startswith("-")]
    if options:
        dat.error(f"unknown option {options[0]}: see dat {argv[0]} --help")
    if hasattr(arguments, "mixed"):
        _sort_out(arguments, rest)
    elif hasattr(arguments, "settings"):
        arguments.settings = [*arguments.settings, *rest]
    elif rest:
        dat.error(f"unexpected argument {rest[0]}: see dat {argv[0]} --help")
    return arguments


def _sort_out(arguments: argparse.Namespace, rest: list[str]) -> None:
    """Tell runs from settings, in any order: a setting has an equals sign and is not a folder."""
    arguments.runs, arguments.settings = [], []
    for word in (*arguments.mixed, *rest):
        if "=" in word and not Path(word).is_dir():
            arguments.settings.append(word)
        else:
            arguments.runs.append(Path(word))


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    dat = describe(argparse.ArgumentParser(prog="dat", allow_abbrev=False), ABOUT, "")
    commands = Commands(dat.add_subparsers(metavar="COMMAND", required=True))
    for command in COMMANDS:
        command.add(commands)
    return dat
