"""Slow imports, deferred until first use.

A component is its own configuration, so `dat config` and every check of a setting import the
component's module; they must not wait seconds for torch. Such a module imports torch from here,
`from dat.core.lazy import torch`, and names for annotations only (`Tensor`, `nn`) from torch itself
under `TYPE_CHECKING`. A package whose modules need torch at import time (networks, optimizers)
exports its names with `lazy_names`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dat.core.deprecation import warn_renamed


class LazyModule:
    """A proxy that imports its module on first attribute access."""

    __slots__ = ("__dict__", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        # the top-level package first: all threads take the import locks in the same order
        importlib.import_module(self._name.partition(".")[0])
        module = importlib.import_module(self._name)
        self.__dict__ = module.__dict__  # from now on, attribute access needs no __getattr__
        return getattr(module, attribute)


def lazy_names(
    package: str, *, renamed: Mapping[str, str] | None = None, **modules: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package that imports its names on first use.

    `modules` maps each module of the package to the names taken from it, separated by spaces. Both
    are attributes of the package. A module must not have the name of an exported object: once
    imported, it would shadow it. A leading dot means the package above, as in relative imports.
    `renamed` maps old names, which are deprecated, to new ones. Use this under `if not
    TYPE_CHECKING`, with plain imports for the type checker, which would otherwise accept any name.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}
    this, new_names = sys.modules[package], renamed or {}

    def get(name: str) -> Any:
        if name in new_names:
            warn_renamed(f"{package}.{name}", f"{package}.{new_names[name]}", stacklevel=2)
            return getattr(this, new_names[name])
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{module_of[name]}", package), name)
        setattr(this, name, value)
        return value

    def names() -> list[str]:
        return sorted({*this.__all__, *(name for name in modules if "." not in name)})

    return get, names


if TYPE_CHECKING:
    import numpy as numpy
    import torch as torch
    from torch import nn as nn
    from torch.nn import functional as functional
else:
    numpy = LazyModule("numpy")
    torch = LazyModule("torch")
    nn = LazyModule("torch.nn")
    functional = LazyModule("torch.nn.functional")
