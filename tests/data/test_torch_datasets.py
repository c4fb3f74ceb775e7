"""Datasets as PyTorch users have them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset
from torch.utils.data import TensorDataset as Tensors

from dat.core.rng import Streams
from dat.data import ImageData, image_data
from dat.data.torch_datasets import DatasetImages

COUNT = 12
PIXELS = torch.rand(COUNT, 3, 4, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(COUNT) % 3


class Pairs(Dataset[Any]):
    """A map-style dataset; `form` turns a tensor into what it returns as an image."""

    def __init__(self, form: Any = lambda x: x, label: Any = int) -> None:
        self.form, self.label, self.reads = form, label, 0

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        self.reads += 1
        return self.form(PIXELS[row]), self.label(LABELS[row])


class WithTargets(Pairs):
    """Has a list of labels, as torchvision's datasets do."""

    classes = ("cat", "dog", "ship")

    @property
    def targets(self) -> list[int]:
        return LABELS.tolist()


def as_bytes(x: Tensor) -> Tensor:
    return (x * 255).round().to(torch.uint8)


def as_array(x: Tensor) -> Any:
    return as_bytes(x).permute(1, 2, 0).numpy()


def picture(x: Tensor) -> Image.Image:
    return Image.fromarray(as_array(x))


def same(data: ImageData, images: Tensor = PIXELS) -> None:
    x, y = data.batch(torch.arange(COUNT), torch.device("cpu"))
    assert torch.equal(x, images) and torch.equal(y, LABELS)
    assert data.classes == 3 and len(data) == COUNT and data.shape == (3, 4, 5)


FORMS: dict[str, Any] = {
    "ImageData": ImageData.of(PIXELS, LABELS),
    "pair of tensors": (PIXELS, LABELS),
    "pair of arrays": [PIXELS.numpy(), LABELS.numpy()],
    "TensorDataset": Tensors(PIXELS, LABELS),
    "map-style": Pairs(),
    "labels as tensors": Pairs(label=lambda y: y),
    "with targets": WithTargets(),
    "Subset": Subset(Pairs(), range(COUNT)),
    "ConcatDataset": ConcatDataset(
        [Subset(WithTargets(), range(5)), Subset(Pairs(), range(5, COUNT))]
    ),
    "DataLoader": DataLoader(Pairs(), batch_size=5),
    "list of pairs": [(x, int(y)) for x, y in zip(PIXELS, LABELS, strict=True)],
}


@pytest.mark.parametrize("form", FORMS)
def test_pytorch_datasets_become_image_data(form: str) -> None:
    same(image_data(FORMS[form]))


@pytest.mark.parametrize("form", [as_bytes, as_array, picture])
def test_bytes_arrays_and_pictures_are_read(form: Any) -> None:
    same(image_data(Pairs(form)), as_bytes(PIXELS).float() / 255)


def test_class_names_and_listed_labels_are_used() -> None:
    dataset = WithTargets()
    data = image_data(dataset)
    assert data.names == dataset.classes
    assert dataset.reads <= 9  # the first image, and eight labels to compare


def test_listed_labels_that_the_dataset_transforms_are_not_used() -> None:
    class Shifted(WithTargets):
        def __getitem__(self, row: int) -> tuple[Any, Any]:
            return PIXELS[row], (int(LABELS[row]) + 1) % 3

    assert torch.equal(image_data(Shifted()).labels, (LABELS + 1) % 3)


def noisy(x: Tensor) -> Tensor:
    noise = random.random() + np.random.rand() + torch.rand(())  # noqa: NPY002
    return (x + noise) / 4


def test_random_transforms_depend_on_the_image_and_the_stream_alone() -> None:
    """Neither the order of reading nor the global generators matter."""
    images = DatasetImages(Pairs(noisy))
    rows = torch.tensor([3, 7, 1])
    first = images.read_random(rows, Streams.of(0, "a", index=rows))
    torch.manual_seed(99)
    random.seed(99)
    again = images.read_random(rows.flip(0), Streams.of(0, "a", index=rows.flip(0))).flip(0)
    assert torch.equal(first, again)
    other = images.read_random(rows, Streams.of(0, "b", index=rows))
    assert not torch.equal(first, other)
    assert torch.equal(images[rows], images.take(rows)[torch.arange(3)])  # as for evaluation


def test_global_generators_are_left_alone() -> None:
    images = DatasetImages(Pairs(noisy))
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    images[torch.arange(4)]
    assert torch.equal(torch.rand(3), expected)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


BAD: dict[str, tuple[Any, str]] = {
    "no dataset": (3, "data is a int: must be a map-style dataset"),
    "a stream": (Stream(), "a stream has no order"),
    "empty": ([], "the dataset is empty"),
    "no pairs": ([PIXELS[0], PIXELS[1], PIXELS[2]], r"item 0 of the dataset is a Tensor: must be"),
    "float labels": ([(PIXELS[0], "cat")] * 3, "the label of item 0 is a str: must be an integer"),
    "normalized": (Pairs(lambda x: x * 2 - 1), r"image 0 has pixels from .* must be in \[0, 1\]"),
    "flat": (Pairs(lambda x: x.flatten()), "image 0 has shape .*: must be"),
    "three tensors": (Tensors(PIXELS, LABELS, LABELS), "TensorDataset of 3 tensors"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_refused_in_one_line(case: str) -> None:
    data, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        image_data(data).batch(torch.arange(2), torch.device("cpu"))


def test_images_of_several_sizes_are_refused() -> None:
    sizes = [(PIXELS[0], 0), (PIXELS[0][:, :2], 1)]
    with pytest.raises(ValueError, match=r"image 1 is \(3, 2, 5\) float32, the first one"):
        image_data(sizes).batch(torch.arange(2), torch.device("cpu"))  # type: ignore[arg-type]
