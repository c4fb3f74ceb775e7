"""RandAugment's operations against Pillow, and how they are chosen."""

from __future__ import annotations

import platform
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps
from scipy import stats
from sklearn.datasets import load_sample_image
from torch import Tensor

from dat.core.rng import Streams, generator
from dat.data import randaugment
from dat.data.randaugment import OPERATIONS, STRONGEST, rand_augment

Judge = Callable[[Image.Image, int, float], Image.Image]
"""From a picture, a sign and a strength in [0, 1] to what Pillow makes of it."""
Enhancer = (
    ImageEnhance.Color | ImageEnhance.Contrast | ImageEnhance.Brightness | ImageEnhance.Sharpness
)


def warped(place: int, value: Callable[[Image.Image, float], float]) -> Judge:
    """The affine map that differs from the identity in one of its six numbers."""

    def judge(picture: Image.Image, sign: int, s: float) -> Image.Image:
        numbers = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
        numbers[place] = sign * value(picture, s)
        kind, filter = Image.Transform.AFFINE, Image.Resampling.NEAREST
        return picture.transform(picture.size, kind, numbers, filter)

    return judge


def enhanced(kind: Callable[[Image.Image], Enhancer]) -> Judge:
    return lambda picture, sign, s: kind(picture).enhance(1 + sign * 0.9 * s)


PILLOW: dict[str, Judge] = {
    "identity": lambda picture, sign, s: picture,
    "autocontrast": lambda picture, sign, s: ImageOps.autocontrast(picture),
    "equalize": lambda picture, sign, s: ImageOps.equalize(picture),
    "rotate": lambda picture, sign, s: picture.rotate(sign * 30 * s, Image.Resampling.NEAREST),
    "solarize": lambda picture, sign, s: ImageOps.solarize(picture, round(256 * (1 - s))),
    "color": enhanced(ImageEnhance.Color),
    "posterize": lambda picture, sign, s: ImageOps.posterize(picture, 8 - round(4 * s)),
    "contrast": enhanced(ImageEnhance.Contrast),
    "brightness": enhanced(ImageEnhance.Brightness),
    "sharpness": enhanced(ImageEnhance.Sharpness),
    "shear-x": warped(1, lambda picture, s: 0.3 * s),
    "shear-y": warped(3, lambda picture, s: 0.3 * s),
    "translate-x": warped(2, lambda picture, s: round(0.33 * s * picture.width)),
    "translate-y": warped(5, lambda picture, s: round(0.33 * s * picture.height)),
}
ENHANCED = ("color", "contrast", "brightness", "sharpness")
FUSED = platform.machine().lower() not in ("x86_64", "amd64")
"""Where Pillow may have been compiled to multiply and add in one rounding, in its blends."""


def to_picture(image: Tensor) -> Image.Image:
    array = image.permute(1, 2, 0).numpy()
    return Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)


def to_image(picture: Image.Image) -> Tensor:
    array = torch.from_numpy(np.array(picture))
    return array.unsqueeze(0) if array.dim() == 2 else array.permute(2, 0, 1)


def noise(*shape: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(
        low, high, shape, generator=generator(0, "noise", *shape), dtype=torch.uint8
    )


def photographs(n: int, channels: int, height: int, width: int) -> Tensor:
    """Pieces of the two photographs that come with scikit-learn."""
    both = [load_sample_image(name).copy() for name in ("china.jpg", "flower.jpg")]
    whole = [torch.from_numpy(photo).permute(2, 0, 1)[:channels] for photo in both]
    corners = [(i % 2, 17 * i, 31 * i) for i in range(n)]
    return torch.stack([whole[j][:, a : a + height, b : b + width] for j, a, b in corners])


def samples(channels: int, height: int, width: int) -> Tensor:
    """Noise, noise of few levels, one color alone, and photographs."""
    size = (channels, height, width)
    flat = torch.full((1, *size), 77, dtype=torch.uint8)
    low_contrast = noise(3, *size, low=100, high=120)
    return torch.cat((noise(4, *size), low_contrast, flat, photographs(6, *size)))


def streams(n: int, *, key: int = 1) -> Streams:
    return Streams(key, torch.arange(n) * 5)


def test_each_operation_has_a_reference() -> None:
    assert list(OPERATIONS) == list(PILLOW) and len(OPERATIONS) == 14


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("size", [(32, 32), (28, 41), (2, 5), (1, 1)])
@pytest.mark.parametrize("channels", [1, 3])
def test_each_operation_agrees_with_pillow(name: str, size: tuple[int, int], channels: int) -> None:
    x = samples(channels, *size)
    for magnitude in (0, 3, 9, 17, 30):
        for coin, sign in enumerate((-1, 1)):
            s = magnitude / STRONGEST
            changed = OPERATIONS[name](x, torch.full((len(x),), coin), s)
            expected = torch.stack([to_image(PILLOW[name](to_picture(i), sign, s)) for i in x])
            assert changed.dtype == torch.uint8
            off = (changed.int() - expected.int()).abs().max()
            assert off <= (1 if FUSED and name in ENHANCED else 0)


def test_autocontrast_is_pillows_for_every_darkest_and_brightest_pixel() -> None:
    for low in range(0, 256, 5):
        for high in range(low, 256, 3):
            ramp = torch.arange(low, high + 1, dtype=torch.uint8).view(1, 1, 1, -1)
            changed = OPERATIONS["autocontrast"](ramp, torch.zeros(1, dtype=torch.long), 1.0)[0]
            assert torch.equal(changed, to_image(ImageOps.autocontrast(to_picture(ramp[0]))))


def test_at_magnitude_0_only_the_two_without_a_strength_do_anything() -> None:
    x = samples(3, 16, 16)
    coin = torch.arange(len(x)) % 2
    changing = [name for name, change in OPERATIONS.items() if (change(x, coin, 0.0) != x).any()]
    assert changing == ["autocontrast", "equalize"]


def test_a_grey_image_has_no_color_to_change() -> None:
    x = samples(1, 16, 16)
    assert torch.equal(OPERATIONS["color"](x, torch.arange(len(x)) % 2, 1.0), x)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_operations_of_a_sample_follow_each_other(channels: int) -> None:
    x, draws = noise(60, channels, 9, 8), streams(60)
    augmented = rand_augment(x, draws, operations=3, magnitude=12)
    for i, image in enumerate(x):
        alone = image[None]
        for number in range(3):
            uniform = draws.fork("randaugment", number).uniform(torch.Size((60, 2)))[i]
            operation = list(OPERATIONS.values())[int(uniform[0] * 14)]
            alone = operation(alone, (uniform[1:] >= 0.5).long(), 12 / 30)
        assert torch.equal(augmented[i], alone[0])


def test_operations_and_signs_are_chosen_uniformly_and_independently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chosen(count: int, operations: int, change: Callable[[int], object]) -> float:
        """How likely counts like these are, if all outcomes are equally likely."""
        stubs = {name: change(number) for number, name in enumerate(OPERATIONS)}
        monkeypatch.setattr(randaugment, "OPERATIONS", stubs)
        x = torch.zeros(100 * count, 1, 1, 1, dtype=torch.uint8)
        augmented = rand_augment(x, streams(len(x)), operations=operations, magnitude=9)
        seen = torch.bincount(augmented.flatten().long(), minlength=count)
        assert len(seen) == count
        return float(stats.chisquare(seen.numpy()).pvalue)

    assert chosen(14**2, 2, lambda k: lambda x, coin, s: 14 * x + k) > 0.01
    assert (
        chosen(2 * 14, 1, lambda k: lambda x, coin, s: x + 2 * k + coin.byte().view(-1, 1, 1, 1))
        > 0.01
    )


@settings(max_examples=25)
@given(st.integers(0, 2**62), st.lists(st.integers(0, 19), min_size=1, max_size=30))
def test_operations_on_a_sample_do_not_depend_on_its_batch(key: int, rows: list[int]) -> None:
    x, draws, subset = noise(20, 3, 8, 8), streams(20, key=key), torch.tensor(rows)
    whole = rand_augment(x, draws, operations=2, magnitude=15)
    part = rand_augment(x[subset], draws.select(subset), operations=2, magnitude=15)
    assert torch.equal(part, whole[subset])


@settings(max_examples=40)
@given(
    st.tuples(*[st.integers(1, 9)] * 3),
    st.sampled_from([1, 3]),
    st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.float64]),
    st.integers(0, 4),
    st.integers(0, STRONGEST),
)
def test_shape_type_and_range_stay(
    sizes: tuple[int, int, int], channels: int, dtype: torch.dtype, operations: int, magnitude: int
) -> None:
    n, height, width = sizes
    x = noise(n, channels, height, width).to(dtype)
    if dtype != torch.uint8:
        x /= 255
    before, state = x.clone(), torch.get_rng_state()
    augmented = rand_augment(x, streams(n), operations=operations, magnitude=magnitude)
    assert augmented.shape == x.shape and augmented.dtype == dtype
    assert augmented.min() >= 0 and augmented.max() <= (255 if dtype == torch.uint8 else 1)
    assert torch.equal(x, before) and torch.equal(torch.get_rng_state(), state)


def test_uint8_and_float_images_give_the_same_result() -> None:
    x = noise(80, 3, 8, 8)
    expected = rand_augment(x, streams(80), operations=2, magnitude=9).float().div(255)
    augmented = rand_augment(x.float().div(255), streams(80), operations=2, magnitude=9)
    assert torch.equal(augmented, expected)


def test_other_floats_are_rounded_to_the_nearest_level() -> None:
    x = torch.rand(80, 1, 8, 8, generator=generator(0, "floats"))
    levels = torch.from_numpy(np.rint(x.double().numpy() * 255).astype(np.uint8))
    augmented = rand_augment(x, streams(80), operations=1, magnitude=9)
    expected = rand_augment(levels, streams(80), operations=1, magnitude=9)
    assert torch.equal(augmented, expected.float().div(255))


def test_two_channels_are_refused() -> None:
    with pytest.raises(ValueError, match="images have 2 channels: RandAugment needs 1 or 3"):
        rand_augment(noise(4, 2, 8, 8), streams(4), operations=1, magnitude=9)
