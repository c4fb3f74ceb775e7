"""What a run has to say of itself once it is over."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from dat.data import ImageData
from dat.train.records import EpochRecord
from dat.train.trainer import Trainer

OVERFIT = 3.0
"""Points of held-out RA lost since the best epoch that are worth a word."""
DEVIATIONS = 3
"""From the accuracy of a guess, within which TA is none better."""


def left_out(trainer: Trainer) -> list[str]:
    steps = [f"epoch {epoch + 1}, step {step + 1}" for epoch, step in trainer.left_out]
    return [f"left out, as they were not finite: {'; '.join(steps)}"] if steps else []


def overfitting(trainer: Trainer, records: Sequence[EpochRecord]) -> list[str]:
    """Robust overfitting (Rice et al. 2020): the last weights are worse than the best were. Whoever
    chooses by TA, as standard training does, has no RA to lose."""
    best, last = trainer.best_accuracy(), records[-1].holdout_ra
    if trainer.select_by != "ra" or trainer.watch.collapses or best is None or last is None:
        return []
    if best.ra - last < OVERFIT:
        return []
    return [
        f"robust overfitting: held-out RA was {best.ra:.1f} % after epoch {trainer.best_epoch()} "
        f"and {last:.1f} % after the last; best.safetensors is the former"
    ]


def guessing(ta: float, images: int, test: ImageData) -> list[str]:
    """A TA, in percent, on so many of the test images that naming the most frequent class at all of
    them may reach by chance."""
    share = float(test.labels.bincount().max()) / len(test)
    spread = sqrt(share * (1 - share) / images)
    if share == 1 or ta > 100 * (share + DEVIATIONS * spread):
        return []
    return [
        f"nothing was learnt: TA {ta:.1f} %, and always naming one class gives {100 * share:.1f}; "
        "try a lower optimizer.lr, more steps (a smaller train.batch, more train.epochs), a "
        "smaller threat.eps, and attack.name none first"
    ]
