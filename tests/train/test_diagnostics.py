"""Warnings about robust overfitting, and about a run that has learned nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dat.data import ImageData
from dat.train.diagnostics import chance_level_warnings
from dat.train.selection import BestWeights, Selection


def overfitting(select_by: str, last: float | None, *collapses: object) -> list[str]:
    """The warnings of a run whose best RA was 24.3 %."""
    best = SimpleNamespace(ra=24.3)
    trainer: Any = SimpleNamespace(
        images=SimpleNamespace(holdout=None),
        records=[SimpleNamespace(holdout_ra=last)],
        collapses=collapses,
        threat=None,
        seed=0,
        best_accuracy=lambda: best,
        best_epoch=lambda: 22,
    )
    return BestWeights(Selection(by=select_by), trainer).warnings(trainer)


def test_a_lower_ra_at_the_end_is_reported() -> None:
    (warning,) = overfitting("ra", 18.1)
    assert warning.startswith(
        "robust overfitting: held-out RA was 24.3 % after epoch 22 but 18.1 %"
    )


@pytest.mark.parametrize(
    "run",
    [("ta", 18.1), ("ra", 22.0), ("ra", None), ("ra", 18.1, "a collapse")],
    ids=["standard training", "hardly lower", "not evaluated", "collapse, already reported"],
)
def test_otherwise_there_is_no_warning(run: tuple[Any, ...]) -> None:
    assert overfitting(*run) == []


@pytest.mark.parametrize(
    ("ta", "images", "warned"),
    [(10.0, 1000, True), (12.5, 1000, True), (14.0, 1000, False), (14.0, 100, True)],
)
def test_chance_level_is_reported(ta: float, images: int, warned: bool) -> None:
    """With ten classes, guessing is 10 % accurate, with a deviation of 0.95 % on 1000 images."""
    test = ImageData.of(torch.rand(1000, 2, 2), torch.arange(1000) % 10)
    warnings = chance_level_warnings(ta, images, test)
    assert bool(warnings) == warned
    text = f"nothing was learned: TA {ta} %, and always predicting one"
    assert not warnings or warnings[0].startswith(text)


def test_with_one_class_there_is_nothing_to_learn() -> None:
    test = ImageData.of(torch.rand(10, 2, 2), torch.zeros(10).long())
    assert chance_level_warnings(100.0, 10, test) == []
