"""Random crops and flips, against a loop over the samples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dat.data import AUGMENTATIONS, augment
from dat.data.augment import PADDING
from dat.rng import Draws

every_kind = pytest.mark.parametrize("kind", AUGMENTATIONS)


def images(n: int = 12, channels: int = 2, height: int = 5, width: int = 7) -> Tensor:
    """No two pixels alike, and none is 0."""
    return torch.arange(1.0, 1 + n * channels * height * width).reshape(n, channels, height, width)


def draws(n: int = 12) -> Draws:
    return Draws.of(0, "augment", 3, 1, index=torch.arange(n) * 7)


def shifted(image: Tensor, down: int, right: int) -> Tensor:
    """The image moved by whole pixels, with zeros where nothing comes in."""
    moved = torch.zeros_like(image)
    _, height, width = image.shape
    for row in range(height):
        for column in range(width):
            if 0 <= row + down < height and 0 <= column + right < width:
                moved[:, row, column] = image[:, row + down, column + right]
    return moved


def test_none_is_the_identity() -> None:
    x = images()
    assert torch.equal(augment(x, "none", draws()), x)


@pytest.mark.parametrize("kind", ["crop", "crop-flip"])
@pytest.mark.parametrize("shape", [(2, 5, 7), (1, 8, 8), (3, 2, 3)])
def test_each_image_is_its_own_crop(kind: str, shape: tuple[int, int, int]) -> None:
    x = images(12, *shape)
    found = augment(x, kind, draws())
    luck = draws().uniform(torch.Size((12, 3))).tolist()
    for i, (a, b, coin) in enumerate(luck):
        expected = shifted(x[i], int(a * 9) - PADDING, int(b * 9) - PADDING)
        if kind == "crop-flip" and coin >= 0.5:
            expected = expected.flip(2)
        assert torch.equal(found[i], expected)


@pytest.mark.parametrize("kind", ["crop", "crop-flip"])
def test_all_shifts_and_both_sides_occur_equally(kind: str) -> None:
    n = 9000
    marked = torch.zeros(n, 1, 9, 9)
    marked[:, :, 4, 4] = 1.0
    marked[:, :, 4, 3] = 0.5  # to the left, unless flipped
    found = augment(marked, kind, draws(n))
    places = (found == 1).sum(0)[0]
    assert places.sum() == n  # a shift by 4 keeps the middle in sight
    assert (places - n / 81).abs().max() < 5 * (n / 81) ** 0.5
    flipped = ((found[..., :-1] == 1) & (found[..., 1:] == 0.5)).sum()
    kept = ((found[..., :-1] == 0.5) & (found[..., 1:] == 1)).sum()
    expected = 0.5 if kind == "crop-flip" else 0.0
    assert abs(float(flipped / (flipped + kept)) - expected) < 0.03


@every_kind
def test_a_sample_is_augmented_alike_in_any_batch(kind: str) -> None:
    x, rows = images(), torch.tensor([9, 2, 5])
    assert torch.equal(augment(x[rows], kind, draws().pick(rows)), augment(x, kind, draws())[rows])
    before = torch.get_rng_state()
    assert torch.equal(augment(x, kind, draws()), augment(x, kind, draws()))
    assert torch.equal(before, torch.get_rng_state())


@every_kind
def test_shape_and_range_stay(kind: str) -> None:
    x = images() / images().max()
    found = augment(x, kind, draws())
    assert found.shape == x.shape and found.dtype == x.dtype and found.is_contiguous()
    assert found.min() >= 0 and found.max() <= 1


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'flop': must be one of none, crop, crop-flip"):
        augment(images(), "flop", draws())
