"""Old public names that still work, with a DeprecationWarning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any


class RenamedAttribute:
    """The old name of an attribute or method: `pick = RenamedAttribute("select")` in a class."""

    def __init__(self, new: str) -> None:
        self._new = new

    def __set_name__(self, owner: type, old: str) -> None:
        self._old = old

    def __get__(self, instance: object | None, owner: type) -> Any:
        warn_renamed(f"{owner.__name__}.{self._old}", f"{owner.__name__}.{self._new}", stacklevel=2)
        return getattr(owner if instance is None else instance, self._new)


def renamed_names(module: str, **names: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module that maps old names to new ones: `Old="New"`."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", f"{module}.{names[name]}", stacklevel=2)
        return getattr(sys.modules[module], names[name])

    return get


def warn_renamed(old: str, new: str, *, stacklevel: int) -> None:
    """Warn at `stacklevel`, counted from the caller as in `warnings.warn`."""
    warnings.warn(f"{old} is deprecated, use {new}", DeprecationWarning, stacklevel=stacklevel + 1)
