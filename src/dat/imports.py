"""`package.module:name`: how users name a function or class of their own."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from dat.fields import did_you_mean


def find_callable(name: str, *, what: str) -> Callable[..., Any]:
    """The function or class called `package.module:name`; `what` heads the error messages.

    Code of one's own usually lies beside the recipe, so the current folder is searched as well.
    """
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise ValueError(f"{what} = {name!r}: your own is written package.module:name")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:  # the `dat` script does not put it there
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{what} = {name!r}: cannot import {module_name} ({error}); "
            f"start dat in the folder that has it, put it in {here} or install it"
        ) from error
    except Exception as error:  # the user's module does whatever it does
        raise ValueError(f"{what} = {name!r}: {_told(error)}") from error
    found: Any = getattr(module, attribute, None)
    if not callable(found):
        own = [key for key, it in vars(module).items() if _defined_in(module_name, it)]
        raise ValueError(
            f"{what} = {name!r}: {module_name} has no function or class {attribute!r}"
            f"{did_you_mean(attribute, own) if own else ': write one'}"
        )
    return found  # type: ignore[no-any-return]


def call(function: Callable[..., Any], *, what: str, **arguments: object) -> Any:
    """Call a user's function; whatever it raises becomes one line that says where."""
    try:
        return function(**arguments)
    except Exception as error:
        given = ", ".join(arguments) or "no arguments"
        raise ValueError(f"{what}: failed when called with {given}: {_told(error)}") from error


def _told(error: Exception) -> str:
    """An error and its place, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def _defined_in(module_name: str, it: object) -> bool:
    return callable(it) and getattr(it, "__module__", None) == module_name


def require(package: str, extra: str, *, what: str) -> None:
    """Refuse what needs a package that is not installed, and say how it comes.

    A folder of that name in the current one is no package: W&B leaves such a folder behind.
    """
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ValueError(f"{what}: needs {package}: pip install 'dat[{extra}]'")
