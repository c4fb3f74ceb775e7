"""Warnings about robust overfitting, and about a run that has learned nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dat.data import ImageData
from dat.train.diagnostics import chance_level_warnings, label_warnings, output_warnings
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
    text = f"the model has learned nothing: TA is {ta} %, and always predicting one"
    assert not warnings or warnings[0].startswith(text)


def test_with_one_class_there_is_no_warning() -> None:
    test = ImageData.of(torch.rand(10, 2, 2), torch.zeros(10).long())
    assert chance_level_warnings(100.0, 10, test) == []


@pytest.mark.parametrize("softmax", [False, True])
def test_a_softmax_inside_the_network_is_reported(softmax: bool) -> None:
    layers: list[torch.nn.Module] = [torch.nn.Flatten(), torch.nn.Linear(4, 3)]
    model = torch.nn.Sequential(*layers, *[torch.nn.Softmax(dim=1)] * softmax)
    warnings = output_warnings(model, ImageData.of(torch.rand(9, 2, 2), torch.arange(9) % 3))
    texts = ["the model's outputs are probabilities, not logits"] * softmax
    assert [text.partition(":")[0] for text in warnings] == texts


@pytest.mark.parametrize(
    ("counts", "first", "warned"),
    [((0, 3, 4), 1, True), ((1, 3, 4), 1, False), ((0, 3, 0), 1, False), ((0, 3, 4), 0, False)],
)
def test_labels_that_start_at_1_are_reported(
    counts: tuple[int, ...], first: int, warned: bool
) -> None:
    """`first` is the smallest label of the test images."""
    test = ImageData.of(torch.rand(2, 2, 2), torch.tensor([first, 2]))
    assert bool(label_warnings(torch.tensor(counts), test)) == warned
