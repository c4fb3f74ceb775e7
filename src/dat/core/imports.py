"""User code, named as `package.module:name`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from dat.core.settings import did_you_mean


def is_import_path(name: str) -> bool:
    """Whether a name has the form `package.module:name`, the only one that is ever imported."""
    module_name, colon, attribute = name.partition(":")
    parts = (*module_name.split("."), attribute)
    return bool(colon) and all(part.isidentifier() for part in parts)


def import_callable(name: str, *, what: str) -> Callable[..., Any]:
    """Import the function or class `package.module:name`; `what` starts the error messages.

    The current folder is searched too, as user code usually lies next to the recipe.
    """
    if not is_import_path(name):
        raise ValueError(f"{what} = {name!r}: must have the form package.module:name")
    module_name, _, attribute = name.partition(":")
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:  # the `dat` script does not add it
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{what} = {name!r}: cannot import {module_name} ({error}); "
            f"run dat in the folder that contains it, move it to {folder}, or install it"
        ) from error
    except Exception as error:  # user code may raise anything
        raise ValueError(f"{what} = {name!r}: {_one_line(error)}") from error
    function: Any = getattr(module, attribute, None)
    if not callable(function):
        defined = [key for key, value in vars(module).items() if _defined_in(module_name, value)]
        raise ValueError(
            f"{what} = {name!r}: {module_name} has no function or class {attribute!r}"
            f"{did_you_mean(attribute, defined) if defined else '; define it'}"
        )
    return function  # type: ignore[no-any-return]


def call(function: Callable[..., Any], *, what: str, **arguments: object) -> Any:
    """Call a user's function; any exception becomes a one-line ValueError with its location."""
    try:
        return function(**arguments)
    except Exception as error:
        names = ", ".join(arguments) or "no arguments"
        raise ValueError(f"{what}: failed when called with {names}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    """An error and its location, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{location}"


def _defined_in(module_name: str, value: object) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module_name


DISTRIBUTION, FOREIGN = "dat-robust", "dat"
"""`dat` on the package index is an unrelated project that installs files at the same paths."""


def name_clash() -> str:
    """What to do if the unrelated package `dat` is installed as well; empty if it is not."""
    from importlib import metadata

    try:
        foreign, ours = metadata.metadata(FOREIGN), metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return ""
    if foreign["Summary"] == ours["Summary"]:
        return ""  # this project, from before it was called dat-robust
    return (
        f"the package {FOREIGN} {foreign['Version']} is another project, and has overwritten files "
        f"of {DISTRIBUTION}: pip uninstall {FOREIGN}, then pip install --force-reinstall "
        f"--no-deps {DISTRIBUTION}"
    )


def require(package: str, extra: str, *, what: str) -> None:
    """Raise if an optional package is not installed, and name the extra that installs it.

    A namespace package does not count: W&B leaves a folder of its name in the current one.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(f"{what}: needs {package}; run: pip install 'dat-robust[{extra}]'")
