"""PREDICT of Cohen et al. 2019: the smoothed classifier's prediction, or an abstention."""

from __future__ import annotations

import torch
from scipy.stats import binomtest
from torch import Tensor, nn

from dat.data import ImageData
from dat.evaluation.certification.certify import prepare
from dat.evaluation.certification.sampler import ABSTAIN, SampleRange
from dat.evaluation.workers import world_of


def predict(
    model: nn.Module,
    x: Tensor,
    *,
    sigma: float,
    n: int = 1000,
    alpha: float = 0.001,
    batch: int | None = None,
    seed: int = 0,
) -> Tensor:
    """The smoothed classifier's class of each image, right with probability at least 1 - alpha, or
    -1 where the top two classes are too close to tell apart (Hung & Fithian 2019)."""
    data = ImageData.of(x.detach().cpu(), torch.zeros(len(x), dtype=torch.int64))
    world = world_of(model)
    sampler, _ = prepare(model, data, world, sigma=sigma, alpha=alpha, n=n, batch=batch, seed=seed)
    predictions = []
    for row in range(len(data)):
        counts = sampler.count("predict", [SampleRange(row, 0, n)])[0]
        (first, second), classes = (values.tolist() for values in counts.topk(2))
        tie = first == 0 or binomtest(first, first + second, 0.5).pvalue > alpha
        predictions.append(ABSTAIN if tie else classes[0])
    return torch.tensor(predictions, device=x.device)
