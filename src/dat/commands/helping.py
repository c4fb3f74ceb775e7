"""Commands that help to begin: what the machine has, a recipe to start from, the shell."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from dat.commands.arguments import Commands

SHELLS = ("bash", "zsh", "tcsh")


def add(commands: Commands) -> None:
    new = commands.add(
        "new",
        _new,
        "start your own: a folder with a commented recipe and a network",
        "  dat new mine\n  cd mine; dat train recipe.yaml --workers 2",
    )
    new.add_argument("name", type=Path, metavar="NAME", help="the folder to make")
    commands.add(
        "doctor",
        _doctor,
        "say what this machine has for training, and what is missing",
        "  dat doctor\n  dat doctor --json",
    )
    completion = commands.add(
        "completion",
        _completion,
        "print a script that lets your shell complete dat's commands and options",
        '  eval "$(dat completion bash)"                  now\n'
        "  dat completion bash >> ~/.bash_completion      from now on\n"
        "  dat completion zsh > ~/.zfunc/_dat             with fpath+=~/.zfunc in .zshrc",
    )
    completion.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def _new(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.starter import create

    written = create(arguments.name)
    if arguments.json:
        from dat.report import print_json

        print_json([str(path) for path in written])
        return 0
    for path in written:
        print(path)
    print(f"\ncd {arguments.name}; dat train recipe.yaml --workers 2")
    return 0


def _doctor(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.doctor import BAD, examine_machine
    from dat.report import print_json, print_table

    found = examine_machine()
    if arguments.json:
        print_json([finding._asdict() for finding in found])
    else:
        rows = [[it.area, it.what, it.found, it.state, it.advice] for it in found]
        print_table(["Area", "What", "Found", "", "Advice"], rows)
    bad = [it for it in found if it.state == BAD]
    for it in bad:
        print(f"error: {it.what}: {it.found}; {it.advice}", file=sys.stderr)
    return 1 if bad else 0


def _completion(arguments: argparse.Namespace, words: list[str]) -> int:
    import shtab

    from dat.commands import parser

    whole = parser()
    for action in _actions(whole):
        if action.dest in ("recipe", "mixed"):
            action.complete = RECIPES  # type: ignore[attr-defined]
        elif action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(whole, arguments.shell, preamble=_preamble()))  # type: ignore[arg-type]
    return 0


RECIPES = {"bash": "_dat_recipes", "zsh": "_files", "tcsh": "f"}
"""How each shell completes a recipe or the folder of a run."""


def _preamble() -> dict[str, str]:
    """Recipes by name; dat.recipes would know them, but brings torch along."""
    files = resources.files("dat").joinpath("recipes").iterdir()
    names = sorted(it.name.removesuffix(".yaml") for it in files if it.name.endswith(".yaml"))
    return {"bash": f'_dat_recipes() {{ compgen -W "{" ".join(names)}" -- $1; compgen -f -- $1; }}'}


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Of a parser and of the commands in it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)
