"""Warnings about a run that has learned nothing."""

from __future__ import annotations

from math import sqrt

from dat.data import ImageData

DEVIATIONS = 3
"""Standard deviations around chance level within which TA is no better than guessing."""


def chance_level_warnings(ta: float, images: int, test: ImageData) -> list[str]:
    """Warn if a TA, in percent, on this number of test images is no better than always predicting
    the most frequent class."""
    chance = float(test.labels.bincount().max()) / len(test)
    deviation = sqrt(chance * (1 - chance) / images)
    if chance == 1 or ta > 100 * (chance + DEVIATIONS * deviation):
        return []
    return [
        f"nothing was learned: TA {ta:.1f} %, and always predicting one class gives "
        f"{100 * chance:.1f}; try a lower optimizer.lr, more steps (a smaller train.batch, more "
        "train.epochs), a smaller threat.eps, and attack.name none first"
    ]
