"""Old names of modules still work, and say where they are now."""

from __future__ import annotations

import importlib
import sys

import pytest

from dat.core.moved import MOVED


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """As in a process that has not used an old name yet."""
    for name in list(sys.modules):
        if name.removeprefix("dat.").partition(".")[0] in MOVED and name.startswith("dat."):
            del sys.modules[name]


@pytest.mark.parametrize("old", MOVED)
def test_an_old_module_is_the_new_one(old: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"dat\.{old} is now dat\.{MOVED[old]}"):
        module = importlib.import_module(f"dat.{old}")
    assert module is importlib.import_module(f"dat.{MOVED[old]}")
    assert module.__name__ == f"dat.{MOVED[old]}"


def test_modules_below_an_old_package_are_found_too() -> None:
    with pytest.warns(DeprecationWarning, match=r"dat\.comm is now dat\.distributed"):
        old = importlib.import_module("dat.comm.world")
    assert old is importlib.import_module("dat.distributed.world")


def test_other_names_are_still_unknown() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'dat\.nothing'"):
        importlib.import_module("dat.nothing")
