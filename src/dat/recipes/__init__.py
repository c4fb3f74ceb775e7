"""Recipes: one YAML file each, whose first lines give command, hardware, cost and result.

A recipe may start from another one (`base: digits`) and say only what differs.
"""

from __future__ import annotations

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


def _settings(recipe: str, seen: tuple[str, ...]) -> dict[str, Any]:
    if recipe in seen:
        raise SettingError(f"recipe {recipe} is its own base: {' -> '.join((*seen, recipe))}")
    try:
        values = yaml.safe_load(_text(recipe, seen[-1] if seen else None)) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise SettingError(f"recipe {recipe} is not a YAML file: {reason}") from None
    if not isinstance(values, dict):
        raise SettingError(f"recipe {recipe}: must be a group of settings")
    base = values.pop("base", None)
    return values if base is None else merge(_settings(str(base), (*seen, recipe)), values)


def _text(recipe: str, named_in: str | None) -> str:
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml"):
        if named_in is not None and not path.is_absolute():
            path = Path(named_in).parent / path
        if not path.is_file():
            raise SettingError(f"recipe {recipe}: no such file")
        return path.read_text()
    if recipe not in names():
        raise SettingError(
            f"unknown recipe {recipe!r}{did_you_mean(recipe, names())} "
            "(or the path of a .yaml file; `dat recipes` lists all)"
        )
    return resources.files(__name__).joinpath(f"{recipe}.yaml").read_text()
