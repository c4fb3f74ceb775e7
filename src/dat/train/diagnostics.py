"""Warnings about a run that will learn less than it could, or that has learned nothing."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn

from dat.attacks import attack_mode
from dat.core.rng import seeded
from dat.data import ImageData
from dat.evaluation.checks import check_probabilities
from dat.models import adapted

DEVIATIONS = 3
"""Standard deviations around chance level within which TA is no better than guessing."""

PROBED = 8
"""Number of images whose outputs are checked."""


def chance_level_warnings(ta: float, images: int, test: ImageData) -> list[str]:
    """Warn if a TA, in percent, on this number of test images is no better than always predicting
    the most frequent class."""
    chance = float(test.labels.bincount().max()) / len(test)
    deviation = sqrt(chance * (1 - chance) / images)
    if chance == 1 or ta > 100 * (chance + DEVIATIONS * deviation):
        return []
    return [
        f"the model has learned nothing: TA is {ta:.1f} %, and always predicting one class gives "
        f"{100 * chance:.1f} %; first check that it learns with attack.name none, then try a lower "
        "optimizer.lr, more steps (a smaller train.batch, more train.epochs) or a smaller "
        "threat.eps"
    ]


def output_warnings(model: nn.Module, data: ImageData) -> list[str]:
    """Warn before training if the model returns probabilities instead of logits."""
    device = next(model.parameters()).device
    x, _ = data.batch(torch.arange(min(len(data), PROBED)), device)
    with attack_mode(model), seeded(device, 0, "check"), torch.no_grad():
        return check_probabilities(adapted(model, x)(x))


def label_warnings(counts: Tensor, test: ImageData) -> list[str]:
    """Warn if class 0, and no other, has no images; `counts` are those of the training images."""
    if len(counts) < 2 or counts[0] or not counts[1:].all() or (test.labels == 0).any():
        return []
    return [
        f"no image has label 0, but labels 1 to {len(counts) - 1} occur: if the labels start at "
        "1, subtract 1; otherwise the network has an output for a class that does not exist"
    ]
