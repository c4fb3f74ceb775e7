"""Random crops, flips and cutout, against a loop over the samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dat.core.rng import Streams, generator
from dat.data import AUGMENTATIONS, Augmentation
from dat.data.augment import PADDING
from dat.kernels.native import crop

every_kind = pytest.mark.parametrize("kind", AUGMENTATIONS)


def augment(x: Tensor, kind: str, draws: Streams) -> Tensor:
    """Crops and flips alone."""
    return Augmentation(kind=kind)(x, draws)


def images(n: int = 12, channels: int = 2, height: int = 5, width: int = 7) -> Tensor:
    """No two pixels alike, and none is 0."""
    return torch.arange(1.0, 1 + n * channels * height * width).reshape(n, channels, height, width)


def bytes_(*shape: int) -> Tensor:
    seeded = generator(0, "bytes", *shape)
    return torch.randint(0, 256, shape, generator=seeded, dtype=torch.uint8)


def draws(n: int = 12) -> Streams:
    return Streams.of(0, "augment", 3, 1, index=torch.arange(n) * 7)


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
    augmented = augment(x, kind, draws())
    uniform = draws().uniform(torch.Size((12, 3))).tolist()
    for i, (a, b, coin) in enumerate(uniform):
        expected = shifted(x[i], int(a * 9) - PADDING, int(b * 9) - PADDING)
        if kind == "crop-flip" and coin >= 0.5:
            expected = expected.flip(2)
        assert torch.equal(augmented[i], expected)


@pytest.mark.parametrize("kind", ["crop", "crop-flip"])
def test_all_shifts_and_both_sides_occur_equally(kind: str) -> None:
    n = 9000
    marked = torch.zeros(n, 1, 9, 9)
    marked[:, :, 4, 4] = 1.0
    marked[:, :, 4, 3] = 0.5  # to the left, unless flipped
    augmented = augment(marked, kind, draws(n))
    positions = (augmented == 1).sum(0)[0]
    assert positions.sum() == n  # a shift by 4 keeps the middle in sight
    assert (positions - n / 81).abs().max() < 5 * (n / 81) ** 0.5
    flipped = ((augmented[..., :-1] == 1) & (augmented[..., 1:] == 0.5)).sum()
    kept = ((augmented[..., :-1] == 0.5) & (augmented[..., 1:] == 1)).sum()
    expected = 0.5 if kind == "crop-flip" else 0.0
    assert abs(float(flipped / (flipped + kept)) - expected) < 0.03


@every_kind
def test_augmentation_of_a_sample_does_not_depend_on_its_batch(kind: str) -> None:
    x, rows = images(), torch.tensor([9, 2, 5])
    assert torch.equal(
        augment(x[rows], kind, draws().select(rows)), augment(x, kind, draws())[rows]
    )
    before = torch.get_rng_state()
    assert torch.equal(augment(x, kind, draws()), augment(x, kind, draws()))
    assert torch.equal(before, torch.get_rng_state())


@every_kind
def test_shape_and_range_stay(kind: str) -> None:
    x = images() / images().max()
    augmented = augment(x, kind, draws())
    assert augmented.shape == x.shape and augmented.dtype == x.dtype and augmented.is_contiguous()
    assert augmented.min() >= 0 and augmented.max() <= 1


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'flop': must be one of none, crop, crop-flip"):
        augment(images(), "flop", draws())


@pytest.mark.parametrize("kind", ["crop", "crop-flip"])
def test_results_do_not_depend_on_memory_order(kind: str) -> None:
    x = images()
    augmented = augment(x.contiguous(memory_format=torch.channels_last), kind, draws())
    assert torch.equal(augmented, augment(x, kind, draws())) and augmented.is_contiguous()


def test_resized_crop_only_flips_what_was_cropped_elsewhere() -> None:
    x = images()
    augmented = augment(x, "resized-crop", draws())
    coins = draws().uniform(torch.Size((12, 3)))[:, 2].tolist()
    for image, flipped, coin in zip(x, augmented, coins, strict=True):
        assert torch.equal(flipped, image if coin < 0.5 else image.flip(2))


@pytest.mark.parametrize("side", [1, 2, 3, 6, 40])
def test_cutout_zeroes_a_square_clipped_at_the_border(side: int) -> None:
    x = images()
    augmented = Augmentation(cutout=side)(x, draws())
    centers = draws().fork("cutout").uniform(torch.Size((12, 2))).tolist()
    for image, cut, (a, b) in zip(x, augmented, centers, strict=True):
        top, left = int(a * 5) - side // 2, int(b * 7) - side // 2
        expected = image.clone()
        expected[:, max(top, 0) : top + side, max(left, 0) : left + side] = 0
        assert torch.equal(cut, expected)


def test_every_pixel_is_the_centre_of_a_hole_equally_often() -> None:
    n = 9000
    holes = (Augmentation(cutout=1)(torch.ones(n, 1, 5, 6), draws(n)) == 0).sum(0)
    assert holes.sum() == n
    assert (holes - n / 30).abs().max() < 5 * (n / 30) ** 0.5


def test_the_parts_follow_each_other() -> None:
    x = bytes_(12, 3, 8, 8)
    every = Augmentation(
        kind="crop-flip", cutout=3, randaugment=2, magnitude=20, jitter=0.4, erasing=0.5
    )
    expected = Augmentation(jitter=0.4)(augment(x, "crop-flip", draws()), draws())
    expected = Augmentation(randaugment=2, magnitude=20)(expected, draws())
    expected = Augmentation(cutout=3)(expected, draws())
    expected = Augmentation(erasing=0.5)(expected, draws())
    assert torch.equal(every(x, draws()), expected)


SETTINGS = st.builds(
    Augmentation,
    kind=st.sampled_from(AUGMENTATIONS),
    cutout=st.integers(0, 12),
    randaugment=st.integers(0, 2),
    magnitude=st.integers(0, 30),
    jitter=st.sampled_from([0.0, 0.4]),
    erasing=st.sampled_from([0.0, 0.7]),
)


@settings(max_examples=60)
@given(
    SETTINGS,
    st.tuples(st.integers(0, 6), st.sampled_from([1, 3]), st.integers(1, 9), st.integers(1, 9)),
)
def test_augmenting_uint8_and_converting_commute(
    change: Augmentation, shape: tuple[int, int, int, int]
) -> None:
    x = bytes_(*shape)
    augmented = change(x, draws(shape[0]))
    assert augmented.shape == x.shape and augmented.dtype == torch.uint8
    floats = change(x.float().div(255), draws(shape[0]))
    assert floats.dtype == torch.float32 and torch.equal(floats, augmented.float().div(255))


@settings(max_examples=40)
@given(SETTINGS, st.permutations(range(12)), st.integers(1, 12))
def test_results_do_not_depend_on_batches_or_their_order(
    change: Augmentation, order: list[int], batch: int
) -> None:
    x, whole = bytes_(12, 3, 6, 5), change(bytes_(12, 3, 6, 5), draws())
    for rows in torch.tensor(order).split(batch):
        assert torch.equal(change(x[rows], draws().select(rows)), whole[rows])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "crop-flop"}, r"kind = 'crop-flop': must be one of none.*mean crop-flip\?"),
        ({"cutout": -1}, "cutout = -1: must be at least 0"),
        ({"cutout": 1.5}, "cutout = 1.5: must be a whole number, at least 0"),
        ({"randaugment": -2}, "randaugment = -2: must be at least 0"),
        ({"jitter": 1.5}, "jitter = 1.5: must be at least 0 and at most 1"),
        ({"erasing": -0.1}, "erasing = -0.1: must be at least 0 and at most 1"),
        ({"magnitude": 31}, "magnitude = 31: must be at least 0 and at most 30"),
    ],
)
def test_a_wrong_setting_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Augmentation(**wrong)


@pytest.mark.parametrize("kind", ["crop", "crop-flip"])
@pytest.mark.parametrize("shape", [(40, 3, 32, 32), (9, 1, 28, 28), (5, 2, 3, 7), (4, 3, 1, 1)])
def test_native_crops_agree_with_torch(
    kind: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randint(0, 256, shape, dtype=torch.uint8)
    draws, augmentation = Streams(5, torch.arange(len(x))), Augmentation(kind=kind)
    augmented = augmentation(x, draws)
    none = torch.zeros(len(x), dtype=torch.int64)
    assert crop(x, none, none, none, 4) is not None
    monkeypatch.setattr("dat.kernels.native._library", lambda: None)
    assert torch.equal(augmented, augmentation(x, draws))
