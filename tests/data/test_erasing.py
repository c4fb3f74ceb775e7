"""Random erasing against a loop over the images, and its distribution."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dat.core.rng import Streams, generator
from dat.data.erasing import erase


def images(n: int, height: int = 16, width: int = 12) -> Tensor:
    random = generator(0, "images")
    return torch.randint(0, 256, (n, 3, height, width), generator=random, dtype=torch.uint8)


def draws(n: int) -> Streams:
    return Streams.of(0, "augment", 1, index=torch.arange(n) * 3)


def box_by_hand(tries: list[list[float]], height: int, width: int) -> tuple[slice, slice] | None:
    """The first proposal that is smaller than the image: area, aspect ratio, place."""
    for share, ratio, down, right in tries:
        area = height * width * (0.02 + share * (1 / 3 - 0.02))
        aspect = math.exp(math.log(0.3) + ratio * (math.log(1 / 0.3) - math.log(0.3)))
        tall, wide = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if tall < height and wide < width:
            top, left = int(down * (height - tall + 1)), int(right * (width - wide + 1))
            return slice(top, top + tall), slice(left, left + wide)
    return None


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_a_box_of_noise_is_in_this_share_of_the_images(share: float) -> None:
    x = images(200)
    erased = erase(x, draws(200), share)
    coins = draws(200).uniform(torch.Size((200, 1))).squeeze(1)
    tries = draws(200).fork("box").uniform(torch.Size((200, 10, 4)), torch.float64)
    noise = (draws(200).fork("noise").uniform(x.shape) * 256).to(torch.uint8)
    for row in range(200):
        expected = x[row].clone()
        box = box_by_hand(tries[row].tolist(), 16, 12)
        if coins[row] < share and box is not None:
            expected[:, box[0], box[1]] = noise[row][:, box[0], box[1]]
        assert torch.equal(erased[row], expected)


def test_areas_and_shares_are_those_of_the_paper() -> None:
    n = 4000
    erased = erase(torch.full((n, 1, 40, 40), 2.0), draws(n), 0.25)
    area = (erased < 2).float().mean((1, 2, 3))
    assert abs(float((area > 0).float().mean()) - 0.25) < 0.03
    area = area[area > 0]
    assert area.min() > 0.01 and area.max() < 0.36
    assert abs(float(area.mean()) - (0.02 + 1 / 3) / 2) < 0.02


def test_no_image_is_erased_if_no_box_fits() -> None:
    x = images(50, 1, 1)
    assert torch.equal(erase(x, draws(50), 1.0), x)
