"""Who else can do it: named on the command line, imported when asked for."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TypeVar

from dat.fields import did_you_mean

T = TypeVar("T")
PACKAGES = {"art": "adversarial-robustness-toolbox"}
"""What to install, where that is not what is imported."""
OFFICIAL = (
    "official: the authors' code needs CUDA to be imported and is not ours to bundle; paper is a "
    "step as they describe it"
)


def choose(names: Sequence[str], known: Mapping[str, T]) -> dict[str, T]:
    """Those that were asked for, in that order."""
    for name in names:
        if name not in known:
            if name == "official":
                raise ValueError(OFFICIAL)
            raise ValueError(f"--against {name}: unknown{did_you_mean(name, known)}")
    return {name: known[name] for name in dict.fromkeys(names)}


def load(name: str) -> ModuleType:
    """A peer's package, or what to do about it."""
    package = PACKAGES.get(name.partition(".")[0], name.partition(".")[0])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is old in it
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name.partition(".")[0]:
            raise ValueError(
                f"--against: {package} is not installed; pip install {package}"
            ) from None
        raise ValueError(
            f"--against: {package} needs {error.name}, which is not installed; "
            f"pip install {error.name}"
        ) from None
    except Exception as error:  # a package that is broken or does not fit this torch
        reason = " ".join(str(error).split())
        raise ValueError(f"--against: {package} cannot be imported ({reason})") from None
