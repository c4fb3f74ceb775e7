"""The command that tells what a cluster will do."""

from __future__ import annotations

import argparse
from pathlib import Path

from dat.commands.arguments import Commands, recipe_arguments


def add(commands: Commands) -> None:
    plan = commands.add("plan", _plan, "x", "  dat plan")
    recipe_arguments(plan, optional=True)
    plan.add_argument("--calibrate", action="store_true")
    plan.add_argument("--result", type=Path, help=argparse.SUPPRESS)


def _plan(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.planning.calibration import calibrate, measure
    from dat.planning.costs import costs_file, save
    if arguments.result:
        measure(arguments.result)
        return 0
    found = calibrate()
    save(found, costs_file())
    for name, value in found.describe():
        print(name, value)
    return 0
