"""A run that ends below its best says so, if robustness is what it was to have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dat.training import _overfitting


def trainer(select_by: str, *, collapses: tuple[object, ...] = ()) -> Any:
    best = SimpleNamespace(ra=24.3)
    return SimpleNamespace(
        select_by=select_by,
        collapses=collapses,
        best_accuracy=lambda: best,
        best_epoch=lambda: 22,
    )


def ended(ra: float | None) -> Any:
    return [SimpleNamespace(holdout_ra=ra)]


def test_a_lower_ra_at_the_end_is_told() -> None:
    (told,) = _overfitting(trainer("ra"), ended(18.1))
    assert told.startswith("robust overfitting: held-out RA was 24.3 % after epoch 22 and 18.1 %")


@pytest.mark.parametrize(
    ("run", "ra"),
    [
        (trainer("ta"), 18.1),
        (trainer("ra"), 22.0),
        (trainer("ra"), None),
        (trainer("ra", collapses=(1,)), 18.1),
    ],
    ids=["standard training", "hardly lower", "not measured", "collapsed, which was told"],
)
def test_else_nothing_is(run: Any, ra: float | None) -> None:
    assert _overfitting(run, ended(ra)) == []
