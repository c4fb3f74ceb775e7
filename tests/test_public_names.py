"""Names below `dat`."""

from __future__ import annotations

import pytest

import dat


@pytest.mark.parametrize("package", ["attacks", "objectives", "models", "optim", "evaluation"])
def test_packages_are_attributes(package: str) -> None:
    assert package in dir(dat)
    module = getattr(dat, package)
    assert module.__name__ == f"dat.{package}"
    assert all(hasattr(module, name) for name in module.__all__)


def test_objectives_by_name() -> None:
    assert dat.objectives.OBJECTIVES["trades"] is dat.objectives.TRADES
    assert isinstance(dat.objectives.MART(), dat.Objective)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(dat, "nothing")
    assert not hasattr(dat.objectives, "nothing")
