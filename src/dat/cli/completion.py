"""`dat completion`: completion of commands and options in the shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from dat.cli.arguments import Commands

SHELLS = ("bash", "zsh", "tcsh")
RECIPES = {"bash": "_dat_recipes", "zsh": "_files", "tcsh": "f"}
"""How each shell completes a recipe or a run folder."""


def add(commands: Commands) -> None:
    completion = commands.add(
        "completion",
        _completion,
        "print a script that completes dat's commands and options in your shell",
        '  eval "$(dat completion bash)"                  in the current shell\n'
        "  dat completion bash >> ~/.bash_completion      in every new shell\n"
        "  dat completion zsh > ~/.zfunc/_dat             with fpath+=~/.zfunc in .zshrc",
    )
    completion.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def _completion(arguments: argparse.Namespace, argv: list[str]) -> int:
    import shtab

    from dat.cli.parser import parser

    dat = parser()
    for action in _actions(dat):
        if action.dest in ("recipe", "mixed"):
            action.complete = RECIPES  # type: ignore[attr-defined]
        elif action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(dat, arguments.shell, preamble=_preamble()))  # type: ignore[arg-type]
    return 0


def _preamble() -> dict[str, str]:
    """A shell function that completes the names of recipes."""
    from dat.config.recipes import names

    words = " ".join(names())
    return {"bash": f'_dat_recipes() {{ compgen -W "{words}" -- $1; compgen -f -- $1; }}'}


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The actions of a parser and of all its sub-commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
