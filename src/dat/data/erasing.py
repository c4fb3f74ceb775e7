"""Random erasing (Zhong et al. 2020, arXiv 1708.04896): a box of random pixels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dat.core.lazy import torch
from dat.core.rng import Streams

if TYPE_CHECKING:
    from torch import Tensor

AREAS = (0.02, 1 / 3)
"""The erased share of an image's area."""
ASPECTS = (0.3, 1 / 0.3)
"""Height over width of the box."""
TRIES = 10
"""Boxes that are proposed for each image; the first that fits is taken, if any does."""


def erase(x: Tensor, draws: Streams, share: float) -> Tensor:
    """Fill a box with uniform noise, in this share of the images."""
    chosen = draws.uniform(torch.Size((len(x), 1))).squeeze(1) < share
    rows = chosen.nonzero().squeeze(1)
    if len(rows) == 0:
        return x
    own = draws.select(rows)
    hole = _boxes(own.fork("box"), *x.shape[2:]).unsqueeze(1)
    levels = (own.fork("noise").uniform(x[rows].shape) * 256).long()
    noise = levels.to(x.dtype) if x.dtype == torch.uint8 else levels.to(x.dtype).div_(255)
    return x.index_copy(0, rows, torch.where(hole, noise, x[rows]))


def _boxes(draws: Streams, height: int, width: int) -> Tensor:
    """A mask of each image's box, as (n, height, width)."""
    count = len(draws.index)
    uniform = draws.uniform(torch.Size((count, TRIES, 4)), torch.float64)
    area = height * width * (AREAS[0] + uniform[..., 0] * (AREAS[1] - AREAS[0]))
    low, high = map(math.log, ASPECTS)
    aspect = (low + uniform[..., 1] * (high - low)).exp()
    tall, wide = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (tall < height) & (wide < width)
    first = fits.int().argmax(1, keepdim=True)

    def within(size: int, length: Tensor, place: Tensor) -> Tensor:
        length = torch.where(fits, length, 0).gather(1, first)
        start = (place.gather(1, first) * (size - length + 1)).floor()
        position = torch.arange(size, device=length.device)
        return (position >= start) & (position < start + length)

    rows, columns = within(height, tall, uniform[..., 2]), within(width, wide, uniform[..., 3])
    return rows[:, :, None] & columns[:, None, :]
