"""A run that ends below its best says so, if robustness is what it was to have, and one that has
learnt nothing does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dat.data import ImageData
from dat.train.remarks import guessing, overfitting


def trainer(select_by: str, *, collapses: tuple[object, ...] = ()) -> Any:
    best = SimpleNamespace(ra=24.3)
    return SimpleNamespace(
        select_by=select_by,
        watch=SimpleNamespace(collapses=collapses),
        best_accuracy=lambda: best,
        best_epoch=lambda: 22,
    )


def ended(ra: float | None) -> Any:
    return [SimpleNamespace(holdout_ra=ra)]


def test_a_lower_ra_at_the_end_is_told() -> None:
    (told,) = overfitting(trainer("ra"), ended(18.1))
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
    assert overfitting(run, ended(ra)) == []


@pytest.mark.parametrize(
    ("ta", "images", "told"),
    [(10.0, 1000, True), (12.5, 1000, True), (14.0, 1000, False), (14.0, 100, True)],
)
def test_a_guess_is_told(ta: float, images: int, told: bool) -> None:
    """One class of ten: a guess is right at 10 %, give or take 3 times 0.95 % of 1000 images."""
    test = ImageData.of(torch.rand(1000, 2, 2), torch.arange(1000) % 10)
    said = guessing(ta, images, test)
    assert bool(said) == told
    assert not said or said[0].startswith(f"nothing was learnt: TA {ta} %, and always naming one")


def test_of_one_class_nothing_is_to_be_learnt() -> None:
    assert guessing(100.0, 10, ImageData.of(torch.rand(10, 2, 2), torch.zeros(10).long())) == []
