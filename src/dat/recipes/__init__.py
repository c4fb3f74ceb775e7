"""Recipes: one YAML file each, whose first lines give command, hardware, cost and result.

A recipe may start from another one (`base: digits`) and say only what differs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from dat.config import RunConfig, merge
from dat.fields import SettingError, did_you_mean


def names() -> list[str]:
    """The built-in recipes."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def read(recipe: str, edits: Mapping[str, Any] | None = None) -> RunConfig:
    """A built-in name or the path of a YAML file, with edits laid over it, checked."""
    return RunConfig.read(merge(_settings(recipe, ()), edits or {}))


def _settings(recipe: str, above: tuple[str, ...]) -> dict[str, Any]:
    """A recipe's settings over those of its base; `above` are the recipes that led here."""
    if recipe.endswith((".yaml", ".yml")) and above:  # beside the file that names it
        recipe = os.path.normpath(Path(above[-1]).parent / recipe)
    if recipe in above:
        raise SettingError(f"recipe {recipe} is its own base: {' -> '.join((*above, recipe))}")
    try:
        values = yaml.safe_load(_text(recipe)) or {}
    except SettingError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise SettingError(f"recipe {recipe} is not a YAML file: {reason}") from None
    if not isinstance(values, dict):
        raise SettingError(f"recipe {recipe}: must be a group of settings")
    base = values.pop("base", None)
    values.pop("recipe", None)  # a run's own config says which recipe it came from
    return merge({} if base is None else _settings(str(base), (*above, recipe)), values)


def _text(recipe: str) -> str:
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise SettingError(f"recipe {recipe}: no such file")
        return path.read_text()
    if recipe not in names():
        raise SettingError(
            f"unknown recipe {recipe!r}{did_you_mean(recipe, names())} "
            "(or the path of a .yaml file; `dat recipes` lists all)"
        )
    return resources.files(__name__).joinpath(f"{recipe}.yaml").read_text()
