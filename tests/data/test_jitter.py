"""Color jitter against Pillow's ImageEnhance."""

from __future__ import annotations

import platform
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from torch import Tensor

from dat.core.rng import Streams, generator
from dat.data.jitter import ORDERS, jitter

PILLOW: tuple[Callable[[Image.Image], ImageEnhance._Enhance], ...] = (
    ImageEnhance.Brightness,
    ImageEnhance.Contrast,
    ImageEnhance.Color,
)
FUSED = platform.machine().lower() not in ("x86_64", "amd64")
"""Where Pillow may multiply and add in one rounding."""


def images(n: int, channels: int) -> Tensor:
    random = generator(0, "images")
    return torch.randint(0, 256, (n, channels, 9, 7), generator=random, dtype=torch.uint8)


def draws(n: int) -> Streams:
    return Streams.of(0, "augment", 1, index=torch.arange(n) * 3)


def by_pillow(image: Tensor, uniform: list[float], strength: float) -> Tensor:
    array = image.permute(1, 2, 0).numpy()
    picture = Image.fromarray(array[..., 0] if len(image) == 1 else array)
    for operation in ORDERS[int(uniform[-1] * 6)]:
        factor = np.float32(1) + np.float32(strength) * np.float32(2 * uniform[operation] - 1)
        picture = PILLOW[operation](picture).enhance(float(factor))
    array = np.asarray(picture)
    return torch.from_numpy(array.copy()).reshape(9, 7, len(image)).permute(2, 0, 1)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("strength", [0.1, 0.4, 1.0])
def test_jitter_agrees_with_pillow(channels: int, strength: float) -> None:
    x = images(60, channels)
    changed = jitter(x, draws(60), strength)
    uniform = draws(60).uniform(torch.Size((60, 4))).tolist()
    expected = torch.stack(
        [by_pillow(image, row, strength) for image, row in zip(x, uniform, strict=True)]
    )
    assert changed.dtype == torch.uint8
    assert (changed.int() - expected.int()).abs().max() <= int(FUSED)
    assert not torch.equal(changed, x)


def test_every_order_occurs() -> None:
    assert sorted(ORDERS) == [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    places = (draws(600).uniform(torch.Size((600, 4)))[:, -1] * 6).long()
    assert torch.bincount(places, minlength=6).min() > 60


def test_the_images_given_are_not_changed() -> None:
    x = images(4, 3)
    before = x.clone()
    jitter(x, draws(4), 0.5)
    assert torch.equal(x, before)


def test_two_channels_are_refused() -> None:
    with pytest.raises(ValueError, match="images have 2 channels: color jitter needs 1 or 3"):
        jitter(images(2, 2), draws(2), 0.5)
