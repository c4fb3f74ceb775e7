"""`dat new`: a folder to start from."""

from __future__ import annotations

import argparse
from pathlib import Path

from dat.cli.arguments import Commands


def add(commands: Commands) -> None:
    new = commands.add(
        "new",
        _new,
        "create a folder with a commented recipe and an example network",
        "  dat new mine\n  cd mine; dat train recipe.yaml --workers 2",
    )
    new.add_argument("name", type=Path, metavar="NAME", help="the folder to create")


def _new(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.jobs.starter import create

    files = create(arguments.name)
    if arguments.json:
        from dat.report import print_json

        print_json([str(path) for path in files])
        return 0
    for path in files:
        print(path)
    print(f"\ncd {arguments.name}; dat train recipe.yaml --workers 2")
    return 0
