"""`dat recipes`: the built-in recipes."""

from __future__ import annotations

import argparse

from dat.cli.arguments import Commands


def add(commands: Commands) -> None:
    commands.add("recipes", _recipes, "list the built-in recipes", "  dat recipes --json")


def _recipes(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.config.recipes import names, read
    from dat.report import print_json, print_table

    recipes = {name: read(name).about for name in names()}
    if arguments.json:
        print_json([{"recipe": name, "about": about} for name, about in recipes.items()])
    else:
        print_table(["Recipe", "About"], [[name, about] for name, about in recipes.items()])
    return 0
