"""`dat config`: the settings of a recipe."""

from __future__ import annotations

import argparse

from dat.cli.arguments import Commands, recipe_arguments


def add(commands: Commands) -> None:
    config = commands.add(
        "config",
        _config,
        "show every setting of a recipe: value, meaning, allowed values",
        "  dat config digits\n  dat config digits optimizer.name=sgd",
    )
    recipe_arguments(config)


def _config(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.config.recipes import read
    from dat.config.schema import parse_edits
    from dat.report import print_json, print_table

    edits = parse_edits(arguments.settings)
    config = read(arguments.recipe, edits, trust=True)  # shown only: no code is imported
    if arguments.json:
        print_json([row._asdict() for row in config.rows()])
    else:
        headers = ["Setting", "Value", "Meaning", "Allowed"]
        print_table(headers, [list(row) for row in config.rows()])
    return 0
