"""`dat compare`: finished runs side by side."""

from __future__ import annotations

import argparse

from dat.cli.arguments import Commands


def add(commands: Commands) -> None:
    compare = commands.add(
        "compare",
        _compare,
        "compare finished runs side by side",
        "  dat compare runs/standard runs/dat-pgd",
    )
    compare.add_argument("mixed", nargs="+", metavar="RUN", help="run folders")


def _compare(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.config.runs import read_result
    from dat.report import print_json, runs_table

    if arguments.settings:
        raise ValueError(f"{arguments.settings[0]}: not the folder of a run")
    results = [read_result(run) for run in arguments.runs]
    print_json(results) if arguments.json else runs_table(results)
    return 0
