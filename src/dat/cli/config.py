"""`dat config`: the settings of a recipe."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from dat.cli.arguments import Commands, recipe_arguments

if TYPE_CHECKING:
    from dat.config import RunConfig
    from dat.core.settings import SettingRow

VALUE = 16
"""Columns of the values; a longer one is wrapped."""
MOST = 120
"""Columns of the table at most: longer lines are hard to read."""


def add(commands: Commands) -> None:
    config = commands.add(
        "config",
        _config,
        "show the settings of a recipe: value, meaning, allowed values",
        "  dat config digits\n"
        "  dat config digits attack                  only this group\n"
        "  dat config digits attack.steps threat     a setting and a group\n"
        "  dat config digits optimizer.name=sgd optimizer",
    )
    recipe_arguments(config, shown=True)


def _config(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.config.recipes import read
    from dat.config.schema import parse_edits
    from dat.report import print_json

    edits = parse_edits([word for word in arguments.settings if "=" in word])
    config = read(arguments.recipe, edits, trust=True)  # shown only: no code is imported
    rows = selected(config, [word for word in arguments.settings if "=" not in word])
    if arguments.json:
        print_json([row._asdict() for row in rows])
    else:
        width = shutil.get_terminal_size().columns
        print("\n".join(table(rows, min(width - 1, MOST))))
    return 0


def selected(config: RunConfig, filters: Sequence[str]) -> list[SettingRow]:
    """The settings that the filters name, or whose groups they name; without filters, all."""
    rows = list(config.rows())
    unknown = [word for word in filters if not any(_names(word, row.path) for row in rows)]
    if unknown:
        raise _unknown(config, unknown)
    return [row for row in rows if not filters or any(_names(word, row.path) for word in filters)]


def _names(word: str, path: str) -> bool:
    return path == word or path.startswith(f"{word}.")


def _unknown(config: RunConfig, words: Sequence[str]) -> ValueError:
    from dat.core.settings import SettingError
    from dat.core.suggestions import Suggestions

    suggestions = Suggestions(type(config), config.dump())
    splits = (word.rpartition(".") for word in words)
    return SettingError(*(suggestions.unknown(group, key) for group, _, key in splits))


def table(rows: Sequence[SettingRow], width: int) -> list[str]:
    """The lines of a table of settings; values and meanings are wrapped to fit the width."""
    first = max(len("Setting"), *(len(row.path) for row in rows))
    second = min(VALUE, max(len("Value"), *(len(row.value) for row in rows)))
    third = max(VALUE, width - first - second - 4)
    lines = [f"{'Setting':{first}}  {'Value':{second}}  Meaning (allowed values)"]
    for row in rows:
        cells = (
            [row.path],
            textwrap.wrap(row.value, second) or [""],
            textwrap.wrap(f"{row.help} ({row.allowed})", third, break_on_hyphens=False),
        )
        for path, value, meaning in zip_longest(*cells, fillvalue=""):
            lines.append(f"{path:{first}}  {value:{second}}  {meaning}".rstrip())
    return lines
