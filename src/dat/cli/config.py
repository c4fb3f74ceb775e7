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

MEANING = 36
"""Columns that the meaning needs at least; a longer value is wrapped."""
MOST = 120
"""Longer lines are hard to read."""


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
    recipe_arguments(config)
    *_, settings = config._get_positional_actions()
    settings.metavar = "key=value|key"
    settings.help = "settings to override, e.g. attack.steps=5, and groups or settings to show"


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
    """The settings that are named or in a group that is named; without filters, all."""
    from dat.core.settings import SettingError
    from dat.core.suggestions import Suggestions

    rows = list(config.rows())
    unknown = [
        word
        for word in filters
        if not any(row.path == word or row.path.startswith(f"{word}.") for row in rows)
    ]
    if unknown:
        suggestions = Suggestions(type(config), config.dump())
        messages = []
        for word in unknown:
            group, _, key = word.rpartition(".")
            messages.append(suggestions.unknown(group, key))
        raise SettingError(*messages)
    prefixes = tuple(f"{word}." for word in filters)
    return [
        row for row in rows if not filters or row.path in filters or row.path.startswith(prefixes)
    ]


def table(rows: Sequence[SettingRow], width: int) -> list[str]:
    """The lines of a table of settings; values and meanings are wrapped to fit the width."""
    first = max(len(row.path) for row in rows)
    longest = max(5, *(len(row.value) for row in rows))
    second = min(longest, max(8, width - first - 4 - MEANING))
    third = max(8, width - first - second - 4)
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
