"""Deprecated module names: importing one warns and returns the module under its new name."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "build": "config.build",
    "finetune": "config.finetune",
    "recipes": "config.recipes",
    "runs": "config.runs",
    "subject": "config.model_spec",
    "trust": "config.trust",
    "fields": "core.settings",
    "files": "core.files",
    "imports": "core.imports",
    "lazy": "core.lazy",
    "losses": "core.losses",
    "precision": "core.precision",
    "rng": "core.rng",
    "smoothing": "core.smoothing",
    "stages": "core.tracing",
    "threat": "core.threat",
    "comm": "distributed",
    "certification": "evaluation.certification",
    "clusters": "jobs.clusters",
    "datasets": "jobs.data",
    "doctor": "jobs.doctor",
    "launch": "jobs.launch",
    "measure": "jobs.evaluate",
    "selftrain": "jobs.selftrain",
    "training": "jobs.train",
    "commands": "cli",
    "starter": "jobs.starter",
    "convolve": "kernels.convolve",
    "native": "kernels.native",
    "bench": "tools.bench",
    "planning": "tools.planning",
    "profiling": "tools.profiling",
    "reproduce": "tools.reproduce",
    "compute": "train.engine",
    "loggers": "train.loggers",
}
"""Below `dat`: the old name of a module or package, and the new one."""


class MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes first in `sys.meta_path`: another finder would search the new package's path for the
    old submodules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        if package != "dat" or rest.partition(".")[0] not in MOVED:
            return None
        return importlib.util.spec_from_loader(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        old, dot, below = module.__name__.removeprefix("dat.").partition(".")
        new = f"dat.{MOVED[old]}{dot}{below}"
        warnings.warn(f"dat.{old} is now dat.{MOVED[old]}", DeprecationWarning, stacklevel=2)
        sys.modules[module.__name__] = importlib.import_module(new)


def install() -> None:
    """Make the old names importable."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
