"""Code that a run's folder names is imported only with the user's consent.

A setting like `model.name = mynets.small:Net` is code, and a run's folder may come from somebody
else. It is imported only if the user names it too, or trusts the folder.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dat.config.schema import RunConfig, merge
from dat.core.files import CONFIG
from dat.core.imports import is_import_path
from dat.core.settings import Settings


class UntrustedCode(ValueError):
    """A run's folder names code, and the user does not."""


def named_code(settings: Settings) -> dict[str, str]:
    """Every setting that names code: {"model.name": "mynets.small:Net"}."""
    return {
        path: value
        for path, value, field, _ in settings.entries()
        if "limits" in field.metadata and field.metadata["limits"].or_import
        if value is not None and is_import_path(value)
    }


def code_arguments(config: RunConfig) -> list[str]:
    """The arguments that name the config's code: ["model.name=mynets.small:Net"]."""
    return [f"{path}={name}" for path, name in named_code(config).items()]


def repeated_code(config: RunConfig, arguments: Sequence[str]) -> list[str]:
    """Those arguments that name the same code as the config."""
    return [argument for argument in arguments if argument in code_arguments(config)]


def refuse_code(
    config: RunConfig,
    given: Mapping[str, Any],
    source: Path | str,
    *,
    only: Collection[str] | None = None,
) -> None:
    """Refuse a config from `source` that names code which the user's settings `given` do not.

    `only` restricts the check to these settings.
    """
    groups = merge({}, given)  # short forms become groups
    refused = {}
    for path, name in named_code(config).items():
        group, _, key = path.partition(".")
        values = groups.get(group)
        named = isinstance(values, Mapping) and values.get(key) == name
        if not named and (only is None or path in only):
            refused[path] = name
    if refused:
        names = " and ".join(f"{path} = {name!r}" for path, name in refused.items())
        arguments = " ".join(f"{path}={name}" for path, name in refused.items())
        raise UntrustedCode(
            f"{source}: the run's config imports code: {names}. If you trust it, add {arguments} "
            "to the command, or pass --trust"
        )


def is_of_run(file: Path) -> bool:
    """Whether a YAML file is a run's config or anywhere inside a run's folder; so is a link to such
    a file."""
    folders = {*file.absolute().parents, *file.resolve().parents}
    return _names_recipe(file) or any(_is_run(folder) for folder in folders)


def _is_run(folder: Path) -> bool:
    """Whether its config was written by training, or there are weights next to it."""
    config = folder / CONFIG
    try:
        return config.is_file() and (_names_recipe(config) or any(folder.glob("*.safetensors")))
    except OSError:  # no permission to read a parent folder
        return False


def _names_recipe(file: Path) -> bool:
    """Whether a config names the recipe it was made from: only those of runs do. A file that cannot
    be read does not count: no command accepts it as a config."""
    try:
        values = yaml.safe_load(file.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return False
    return isinstance(values, dict) and "recipe" in values
