"""RandAugment (Cubuk et al. 2020, arXiv 1909.13719), batched and on the device.

As in the paper, the operations are those of Pillow on uint8, bit for bit: in integers where Pillow
uses them, including fixed-point coordinates, and in floats where it truncates them. So the result
does not depend on the device either. Unlike in the paper's code, pixels from outside an image are
black, as in the crops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dat.core.lazy import torch
from dat.core.rng import Streams

if TYPE_CHECKING:
    from torch import Tensor

STRONGEST = 30
"""The maximum of the paper's scale of magnitudes."""
SIGNS = (-1, 1)
FIXED = 16
"""Fractional bits of a fixed-point coordinate."""

Operation = Callable[["Tensor", "Tensor", float], "Tensor"]
"""Maps uint8 images, one coin flip (0 or 1) per image and a strength in [0, 1] to uint8 images. The
coin selects the sign, for operations that have one."""
Map = tuple[float, float, float, float, float, float]
"""Affine map to the source of the pixel at (x, y): (a x + b y + c, d x + e y + f)."""


def rand_augment(x: Tensor, draws: Streams, *, operations: int, magnitude: int) -> Tensor:
    """Apply `operations` operations to each image, each chosen from the 14 by the image's stream.

    Floats in [0, 1] are rounded to the nearest of 256 grey levels, even by the identity, and
    returned as levels / 255; images that were converted from uint8 lose nothing.
    """
    levels = levels_of(x, "RandAugment")
    for number in range(operations):
        uniform = draws.fork("randaugment", number).uniform(torch.Size((len(x), 2)))
        choice, coin = (uniform[:, 0] * len(OPERATIONS)).long(), (uniform[:, 1] >= 0.5).long()
        order = choice.argsort()
        counts = torch.bincount(choice, minlength=len(OPERATIONS)).tolist()
        groups = levels.index_select(0, order).split(counts)
        coins = coin[order].split(counts)
        changed = [
            operation(images, signs, magnitude / STRONGEST)
            for operation, images, signs in zip(OPERATIONS.values(), groups, coins, strict=True)
            if len(images)
        ]
        levels = torch.cat(changed).index_select(0, order.argsort())
    return like(levels, x)


def _autocontrast(x: Tensor) -> Tensor:
    """Stretch each channel such that its darkest pixel is 0 and its brightest 255."""
    low, high = x.amin((2, 3), keepdim=True).double(), x.amax((2, 3), keepdim=True).double()
    scale = torch.full_like(low, 255) / (high - low)  # scalar / tensor would round twice
    stretched = (x * scale + -low * scale).clamp_(0, 255)
    return torch.where(high > low, stretched, x).to(torch.uint8)


def _equalize(x: Tensor) -> Tensor:
    """Equalize the histogram of each channel."""
    flat = x.flatten(2).long()
    histogram = flat.new_zeros((*x.shape[:2], 256))
    histogram.scatter_add_(2, flat, torch.ones_like(flat))
    brightest = histogram.gather(2, flat.amax(2, keepdim=True))
    step = (flat.shape[2] - brightest) // 255
    below = histogram.cumsum(2) - histogram
    table = (below + step // 2) // step.clamp_min(1)
    equal = table.clamp_max_(255).gather(2, flat)
    return torch.where(step > 0, equal, flat).to(torch.uint8).view(x.shape)


def _solarize(x: Tensor, threshold: int) -> Tensor:
    """Invert pixels at or above the threshold, which may be 256 and so exceed uint8."""
    return x.bitwise_xor((x.short() >= threshold).to(torch.uint8).mul_(255))


def _posterize(x: Tensor, bits: int) -> Tensor:
    """Keep only the upper bits."""
    return x.bitwise_and(256 - 2 ** (8 - bits))


def grey(x: Tensor) -> Tensor:
    """Luminance by ITU-R 601, as one channel."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.int().split(1, dim=1)
    total: Tensor = 19595 * red + 38470 * green + 7471 * blue + 2**15
    return (total >> 16).to(torch.uint8)


def mean_grey(x: Tensor) -> Tensor:
    """Mean luminance of each image, rounded."""
    count = x.shape[2] * x.shape[3]
    return (2 * grey(x).sum((1, 2, 3), keepdim=True) + count) // (2 * count)


def _smooth(x: Tensor) -> Tensor:
    """Average each pixel (weight 5) with its eight neighbors; border pixels are unchanged."""
    wide = x.int()
    rows = wide[:, :, :-2] + wide[:, :, 1:-1] + wide[:, :, 2:]
    square = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    total = square + 4 * wide[:, :, 1:-1, 1:-1]
    smooth = x.clone()
    smooth[:, :, 1:-1, 1:-1] = (2 * total + 13) // 26
    return smooth


def _enhance(x: Tensor, base: Tensor, coin: Tensor, strength: float) -> Tensor:
    """Move away from the base or towards it, at full strength by 0.9 of the distance."""
    factors = [1 + sign * 0.9 * strength for sign in SIGNS]
    table = torch.tensor(factors, dtype=torch.float32).to(x.device, non_blocking=True)
    return enhance(x, base, table[coin])


def enhance(x: Tensor, base: Tensor, factor: Tensor) -> Tensor:
    """Extrapolate from the base through the image, by one factor per image: 0 is the base, and 1
    the image."""
    start = base.float()
    return (start + factor.view(-1, 1, 1, 1) * (x.float() - start)).clamp_(0, 255).to(torch.uint8)


def levels_of(x: Tensor, name: str) -> Tensor:
    """Floats in [0, 1] as the nearest of 256 grey levels; uint8 unchanged."""
    if x.shape[1] not in (1, 3):
        raise ValueError(f"images have {x.shape[1]} channels: {name} needs 1 or 3")
    return x if x.dtype == torch.uint8 else x.float().mul(255).round_().to(torch.uint8)


def like(levels: Tensor, x: Tensor) -> Tensor:
    """Grey levels in the dtype of `x`: uint8, or floats in [0, 1]."""
    return levels if x.dtype == torch.uint8 else levels.to(x.dtype).div_(255)


def _rotation(degrees: float, height: int, width: int) -> Map:
    """Counter-clockwise rotation about the centre."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    x, y = width / 2, height / 2
    return cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y


def _resample(x: Tensor, coin: Tensor, maps: Sequence[Map]) -> Tensor:
    """Nearest-neighbor resampling by the map that the coin selects; black outside the image.

    Maps apply to pixel centres, hence the halves.
    """
    _, channels, height, width = x.shape
    centered = [(a, b, c + a / 2 + b / 2, d, e, f + d / 2 + e / 2) for a, b, c, d, e, f in maps]
    fixed = [[math.floor(value * 2**FIXED + 0.5) for value in values] for values in centered]
    table = torch.tensor(fixed).to(x.device, non_blocking=True)
    a, b, c, d, e, f = table[coin].T[:, :, None, None]
    column = torch.arange(width, device=x.device)
    row = torch.arange(height, device=x.device)[:, None]
    columns, rows = (a * column + b * row + c) >> FIXED, (d * column + e * row + f) >> FIXED
    outside = (columns < 0) | (columns >= width) | (rows < 0) | (rows >= height)
    source = (rows * width + columns).masked_fill_(outside, 0).flatten(1).unsqueeze(1)
    moved = x.flatten(2).gather(2, source.expand(-1, channels, -1)).view(x.shape)
    return moved.mul_(~outside.unsqueeze(1))


def _shift(size: int, strength: float) -> int:
    """A translation in whole pixels, at full strength 0.33 of the image."""
    return round(0.33 * size * strength)


OPERATIONS: dict[str, Operation] = {
    "identity": lambda x, coin, s: x,
    "autocontrast": lambda x, coin, s: _autocontrast(x),
    "equalize": lambda x, coin, s: _equalize(x),
    "rotate": lambda x, coin, s: _resample(
        x, coin, [_rotation(t * 30 * s, x.shape[2], x.shape[3]) for t in SIGNS]
    ),
    "solarize": lambda x, coin, s: _solarize(x, round(256 * (1 - s))),
    "color": lambda x, coin, s: _enhance(x, grey(x), coin, s),
    "posterize": lambda x, coin, s: _posterize(x, 8 - round(4 * s)),
    "contrast": lambda x, coin, s: _enhance(x, mean_grey(x), coin, s),
    "brightness": lambda x, coin, s: _enhance(x, torch.zeros_like(x), coin, s),
    "sharpness": lambda x, coin, s: _enhance(x, _smooth(x), coin, s),
    "shear-x": lambda x, coin, s: _resample(x, coin, [(1, t * 0.3 * s, 0, 0, 1, 0) for t in SIGNS]),
    "shear-y": lambda x, coin, s: _resample(x, coin, [(1, 0, 0, t * 0.3 * s, 1, 0) for t in SIGNS]),
    "translate-x": lambda x, coin, s: _resample(
        x, coin, [(1, 0, t * _shift(x.shape[3], s), 0, 1, 0) for t in SIGNS]
    ),
    "translate-y": lambda x, coin, s: _resample(
        x, coin, [(1, 0, 0, 0, 1, t * _shift(x.shape[2], s)) for t in SIGNS]
    ),
}
"""The 14 operations of the paper (section 3) and their ranges; s is the magnitude / 30."""
