"""Checking a user's arrays."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dat.data import ImageData, class_balanced_subset, load

CPU = torch.device("cpu")


def labels(count: int = 3) -> Tensor:
    return torch.arange(count)


def images(*shape: int, value: float = 0.5) -> Tensor:
    return torch.full(shape or (3, 1, 2, 2), value)


def with_pixel(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    x = images().to(dtype)
    x[1, 0, 1, 0] = value
    return x


def test_good_data_is_wrapped() -> None:
    data = ImageData.of(images(3, 2, 4, 5), labels())
    assert (len(data), data.channels, data.classes) == (3, 2, 3)
    assert data.images.shape == (3, 2, 4, 5)
    assert data.images.dtype == torch.float32 and data.labels.dtype == torch.int64


def test_classes_may_be_more_than_the_labels_show() -> None:
    assert ImageData.of(images(), labels(), classes=10).classes == 10


def test_grey_images_get_a_channel() -> None:
    data = ImageData.of(torch.arange(12, dtype=torch.uint8).reshape(3, 2, 2), labels())
    assert data.images.shape == (3, 1, 2, 2)
    assert data.tensor()[2, 0].tolist() == [[8, 9], [10, 11]]


def test_bytes_stay_bytes_until_they_are_drawn() -> None:
    data = ImageData.of(torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(3, 1, 1), labels())
    assert data.images.dtype == torch.uint8
    x, y = data.batch(torch.tensor([2, 1, 0]), CPU)
    torch.testing.assert_close(x.flatten(), torch.tensor([1.0, 0.2, 0.0]), rtol=0, atol=1e-7)
    assert x.dtype == torch.float32 and x.shape == (3, 1, 1, 1)
    assert y.tolist() == [2, 1, 0]


def test_every_byte_is_divided_by_255() -> None:
    data = ImageData.of(torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16), labels(1))
    x, _ = data.batch(torch.tensor([0]), CPU)
    torch.testing.assert_close(x.flatten(), torch.arange(256) / 255, rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_floats_become_float32(dtype: torch.dtype) -> None:
    data = ImageData.of(images().to(dtype), labels())
    assert data.images.dtype == torch.float32
    assert data.batch(torch.arange(3), CPU)[0].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_other_integer_labels_become_int64(dtype: torch.dtype) -> None:
    data = ImageData.of(images(), labels().to(dtype))
    assert data.labels.dtype == torch.int64 and data.labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize("value", [-0.9e-6, 1 + 0.9e-6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_errors_are_clipped_away(value: float, dtype: torch.dtype) -> None:
    data = ImageData.of(with_pixel(value, dtype), labels())
    assert data.tensor().min() >= 0 and data.tensor().max() <= 1
    assert float(data.tensor()[1, 0, 1, 0]) == round(value)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (-1.2e-6, "from -1.2e-06 to 0.5"),
        (1 + 1.3e-6, "from 0.5 to 1"),
        (255.0, "from 0.5 to 255"),
        (-2.0, "from -2 to 0.5"),
        (math.nan, "from nan to nan"),
        (math.inf, "from 0.5 to inf"),
        (-math.inf, "from -inf to 0.5"),
    ],
)
def test_pixels_out_of_range_are_refused(value: float, shown: str) -> None:
    with pytest.raises(ValueError, match=f"image 1 has pixels {shown}: must be in") as error:
        ImageData.of(with_pixel(value), labels())
    assert "(1 invalid in total)" in str(error.value)
    assert "leave normalization to the model" in str(error.value)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (images(3, 2), labels(), r"images have shape \(3, 2\): must be \(n, channels,"),
        (images(3, 1, 1, 2, 2), labels(), r"images have shape \(3, 1, 1, 2, 2\)"),
        (torch.tensor(0.5), labels(), r"images have shape \(\)"),
        (torch.zeros(0, 1, 2, 2), labels(0), r"images have shape \(0, 1, 2, 2\)"),
        (images(), labels(2), r"labels have shape \(2,\): must be one per image, \(3,\)"),
        (images(), torch.eye(3).long(), r"labels have shape \(3, 3\)"),
        (images(), labels().float(), "labels are torch.float32: must be integers"),
        (images(), labels().bool(), "labels are torch.bool"),
        (images(), labels().to(torch.complex64), "labels are torch.complex64"),
        (
            images(),
            torch.tensor([0, -1, -2]),
            "label -1 of image 1: .* from 0 to 0 .2 invalid in total",
        ),
        (images().int(), labels(), "images are torch.int32: must be uint8, or floats in"),
        (images().bool(), labels(), "images are torch.bool: must be uint8"),
        (images().to(torch.complex64), labels(), "images are torch.complex64: must be uint8"),
    ],
)
def test_wrong_arrays_are_refused(x: Tensor, y: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageData.of(x, y)


def test_labels_beyond_the_classes_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"label 2 of image 2: must be from 0 to 1 \(1 invalid in total"
    ):
        ImageData.of(images(), labels(), classes=2)


def test_take_copies_the_selected_images() -> None:
    data = ImageData.of(torch.arange(3, dtype=torch.uint8).reshape(3, 1, 1, 1), labels(), classes=7)
    subset = data.take(torch.tensor([2, 0]))
    assert subset.tensor().flatten().tolist() == subset.labels.tolist() == [2, 0]
    assert subset.classes == 7
    subset.tensor().zero_()
    assert data.tensor().flatten().tolist() == [0, 1, 2]


def test_images_without_pixels_are_refused() -> None:
    with pytest.raises(ValueError, match="images have shape"):
        ImageData.of(torch.zeros(3, 1, 0, 0), labels())


@pytest.mark.parametrize("order", ["sorted", "in turn", "as it is"])
def test_a_subset_of_images_is_class_balanced(order: str) -> None:
    data = load("digits").test
    if order != "as it is":
        data = data.take(data.labels.argsort(stable=True))
    if order == "in turn":
        own = [(data.labels == label).nonzero().squeeze(1)[:20] for label in range(10)]
        data = data.take(torch.stack(own).T.flatten())
    some = class_balanced_subset(data, 50)
    assert some.counts().tolist() == [5] * 10
    assert class_balanced_subset(data, None) is data is class_balanced_subset(data, len(data) + 1)
