"""Recipes: one YAML file each, whose header states command, hardware, cost, result and source.

A recipe may build on another one (`base: digits`) and list only the differences.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from dat.config.recipes.header import Header
from dat.config.schema import RunConfig, merge
from dat.config.trust import is_of_run, refuse_code
from dat.core.mistakes import Mistakes, closest
from dat.core.settings import SettingError
from dat.data.names import known_spelling


def names() -> list[str]:
    """The names of the built-in recipes."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def read(recipe: str, edits: Mapping[str, Any] | None = None, *, trust: bool = False) -> RunConfig:
    """Read a recipe, given as a built-in name or the path of a YAML file, and apply edits.

    A recipe may name code. The config of a run, or any file in a run's folder, may not, because it
    may come from somebody else, unless the edits or a recipe that builds on it name the same code,
    or `trust` is set.
    """
    levels = _levels(recipe, ())
    values, mistakes = _merged([*levels.values(), edits or {}]), Mistakes()
    with mistakes.collected():
        config = RunConfig.read(values)
    mistakes.lines += _check_dataset(values.get("data"))
    mistakes.refuse(recipe)
    foreign = [] if trust else _foreign(levels)
    if foreign:
        refuse_code(config, _own(levels, foreign, edits or {}), foreign[-1])
    return config


def _check_dataset(group: object) -> Iterator[str]:
    """Refuse a known dataset in another spelling. Any other name is checked when the data is
    loaded, as not every machine has it."""
    name = group.get("name") if isinstance(group, Mapping) else None
    meant = known_spelling(name) if isinstance(name, str) else None
    if meant not in (None, name) and not Path(str(name)).exists():
        yield f"data.name = {name!r}: unknown: did you mean {meant}?"


def header(name: str) -> Header:
    """What the comment above a built-in recipe states."""
    return Header.parse(_text(name))


def user_settings(recipe: str, edits: Mapping[str, Any]) -> dict[str, Any]:
    """The user's own settings: those of the recipe that do not come from a run, and the edits."""
    levels = _levels(recipe, ())
    return _own(levels, _foreign(levels), edits)


def _foreign(levels: Mapping[str, Any]) -> list[str]:
    """The last level that belongs to a run, and all levels it builds on."""
    foreign = list(levels)
    while foreign and not _is_of_run(foreign[-1]):
        foreign.pop()
    return foreign


def _own(
    levels: Mapping[str, Mapping[str, Any]], foreign: Sequence[str], edits: Mapping[str, Any]
) -> dict[str, Any]:
    return _merged([*(values for name, values in levels.items() if name not in foreign), edits])


def _merged(levels: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the levels; later ones override earlier ones."""
    merged: dict[str, Any] = {}
    for values in levels:
        merged = merge(merged, values)
    return merged


def _is_of_run(recipe: str) -> bool:
    return recipe.endswith((".yaml", ".yml")) and is_of_run(Path(recipe))


def _levels(recipe: str, above: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The settings of a recipe and of all its bases, by name, its own last; `above` are the recipes
    that build on it."""
    if recipe.endswith((".yaml", ".yml")) and above:  # relative to the file that names it
        recipe = os.path.normpath(Path(above[-1]).parent / recipe)
    if recipe in above:
        raise SettingError(f"recipe {recipe} is its own base: {' -> '.join((*above, recipe))}")
    try:
        values = yaml.safe_load(_text(recipe)) or {}
    except SettingError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise SettingError(f"recipe {recipe} is not valid YAML: {reason}") from None
    if not isinstance(values, dict):
        raise SettingError(f"recipe {recipe}: must be a group of settings")
    base = values.pop("base", None)
    values.pop("recipe", None)  # a run's config names the recipe it was made from
    bases = {} if base is None else _levels(str(base), (*above, recipe))
    return bases | {recipe: values}


def _text(recipe: str) -> str:
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise SettingError(f"recipe {recipe}: no such file")
        return path.read_text()
    if recipe not in names():
        match = closest(recipe, names())
        raise SettingError(
            f"unknown recipe {recipe!r}{f': did you mean {match}?' if match else ''} "
            "(`dat recipes` lists all; the name of a file ends in .yaml)"
        )
    return resources.files(__name__).joinpath(f"{recipe}.yaml").read_text()
