"""Commands that show what there is."""

from __future__ import annotations

import argparse

from dat.commands.arguments import Commands, recipe_arguments


def add(commands: Commands) -> None:
    compare = commands.add(
        "compare",
        _compare,
        "show finished runs side by side",
        "  dat compare runs/standard runs/dat-pgd",
    )
    compare.add_argument("mixed", nargs="+", metavar="RUN", help="runs' folders")
    commands.add("recipes", _recipes, "list the built-in recipes", "  dat recipes --json")
    config = commands.add(
        "config",
        _config,
        "show every setting of a recipe: value, meaning, allowed range",
        "  dat config digits\n  dat config digits optimizer.name=sgd",
    )
    recipe_arguments(config)


def _compare(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.build import read_result
    from dat.report import print_json, runs_table

    if arguments.settings:
        raise ValueError(f"{arguments.settings[0]}: not the folder of a run")
    results = [read_result(run) for run in arguments.runs]
    print_json(results) if arguments.json else runs_table(results)
    return 0


def _recipes(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.recipes import names, read
    from dat.report import print_json, print_table

    found = {name: read(name).about for name in names()}
    if arguments.json:
        print_json([{"recipe": name, "about": about} for name, about in found.items()])
    else:
        print_table(["Recipe", "About"], [[name, about] for name, about in found.items()])
    return 0


def _config(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.config import parse_edits
    from dat.recipes import read
    from dat.report import print_json, print_table

    config = read(arguments.recipe, parse_edits(arguments.settings))
    if arguments.json:
        print_json([row._asdict() for row in config.rows()])
    else:
        headers = ["Setting", "Value", "Meaning", "Allowed"]
        print_table(headers, [list(row) for row in config.rows()])
    return 0
