"""Color jitter: brightness, contrast and saturation change by random factors, in random order.

As in torchvision, without the hue. The operations are Pillow's on uint8, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import TYPE_CHECKING

from dat.core.lazy import torch
from dat.core.rng import Streams
from dat.data.randaugment import enhance, grey, levels_of, like, mean_grey

if TYPE_CHECKING:
    from torch import Tensor

BASES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.new_zeros(()),
    mean_grey,
    grey,
)
"""What brightness, contrast and saturation extrapolate from: black, the mean luminance, and each
pixel's own."""
ORDERS = tuple(permutations(range(len(BASES))))


def jitter(x: Tensor, draws: Streams, strength: float) -> Tensor:
    """Change each image by factors from 1 - strength to 1 + strength.

    Floats in [0, 1] are rounded to the nearest of 256 grey levels.
    """
    levels = levels_of(x, "color jitter").clone()
    uniform = draws.uniform(torch.Size((len(x), len(BASES) + 1)))
    factors = 1 + strength * (2 * uniform[:, :-1] - 1)
    order = torch.tensor(ORDERS, device=x.device)[(uniform[:, -1] * len(ORDERS)).long()]
    for place in range(len(BASES)):
        for operation, base in enumerate(BASES):
            rows = (order[:, place] == operation).nonzero().squeeze(1)
            images = levels[rows]
            levels[rows] = enhance(images, base(images), factors[rows, operation])
    return like(levels, x)
