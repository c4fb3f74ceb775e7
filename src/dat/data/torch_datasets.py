"""PyTorch datasets: map-style datasets, data loaders and pairs of tensors.

A dataset is indexed by the trainer itself, in its own order, so that the batches do not depend on
the number of workers and a resumed run sees the same ones. A dataset's random transforms draw from
torch's, numpy's and Python's global generators, which are seeded for each image.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset
from torch.utils.data import TensorDataset as Tensors

from dat.core.rng import Streams
from dat.data.folder import read_pictures
from dat.data.hugging_face import is_hub_dataset, listing_of
from dat.data.images import ImageData, as_floats, check_range
from dat.data.lazy_images import LazyImages
from dat.data.lazy_images import Subset as Rows
from dat.data.local import Partitions
from dat.data.reading import ReadOptions

Data = ImageData | Dataset[Any] | DataLoader[Any] | tuple[Tensor, Tensor]
"""A dataset in any form that `image_data` reads."""
ARRAYS = (Tensor, np.ndarray)
LABELS = ("targets", "labels", "_labels")
"""Attributes in which datasets keep the labels of all images."""
CHECKED = 8
"""Images whose label in the attribute is compared with the one that the dataset returns."""


def image_data(data: Data, *, classes: int | None = None, names: Sequence[str] = ()) -> ImageData:
    """Convert to `ImageData`: (images, labels), a map-style dataset of such pairs, or a data
    loader, whose batches are read into memory."""
    if isinstance(data, ImageData):
        return data
    if isinstance(data, DataLoader):
        return _collected(data, classes, names)
    if isinstance(data, tuple | list) and [isinstance(part, ARRAYS) for part in data] == [True] * 2:
        x, y = (torch.as_tensor(part).detach().cpu() for part in data)
        return ImageData.of(x, y, classes=classes, names=names)
    if isinstance(data, Tensors):
        if len(data.tensors) != 2:
            raise ValueError(f"TensorDataset of {len(data.tensors)} tensors: needs images, labels")
        return ImageData.of(*data.tensors, classes=classes, names=names)
    if isinstance(data, Partitions):
        raise ValueError("the data is stored in partitions, but is needed as one dataset")
    if is_hub_dataset(data):
        (pictures,) = read_pictures([listing_of(data)], ReadOptions())
        return pictures
    if isinstance(data, IterableDataset):
        raise ValueError("a stream has no order: use a map-style dataset, or train on dat.Stream")
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise ValueError(
            f"data is a {type(data).__name__}: must be a map-style dataset of (image, label), a "
            "pair of tensors (images, labels), or dat.ImageData"
        )
    dataset: Any = data
    if not len(dataset):
        raise ValueError("the dataset is empty")
    names = names or tuple(map(str, getattr(data, "classes", ()) or ()))
    lazy = DatasetImages(dataset)
    return ImageData.of(lazy, dataset_labels(dataset), classes=classes, names=names)


class DatasetImages(LazyImages):
    """The images of a map-style dataset, which returns (image, label) pairs."""

    slow = True
    random = True

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset
        with seeded_globals(0):
            first = image_of(self.dataset[0], 0)
        self.dtype = first.dtype
        self.shape = torch.Size((len(dataset), *first.shape))  # type: ignore[arg-type]

    def __getitem__(self, rows: Tensor) -> Tensor:
        return self._read(rows, Streams.of(0, "dataset", index=rows))

    def read_random(self, rows: Tensor, draws: Streams) -> Tensor:
        return self._read(rows, draws)

    def take(self, rows: Tensor) -> LazyImages:
        return Rows(self, rows)

    def _read(self, rows: Tensor, draws: Streams) -> Tensor:
        keys = draws.integers().tolist()
        images = [self._get(row, key) for row, key in zip(rows.tolist(), keys, strict=True)]
        return torch.stack(images) if images else torch.empty((0, *self.shape[1:]))

    def _get(self, row: int, key: int) -> Tensor:
        with seeded_globals(key):
            image = image_of(self.dataset[row], row)
        if image.shape != self.shape[1:] or image.dtype != self.dtype:
            raise ValueError(
                f"image {row} is {_described(image)}, the first one "
                f"{_described(torch.empty(self.shape[1:], dtype=self.dtype))}: the dataset's "
                "transform must give all images one size and dtype"
            )
        if image.dtype != torch.uint8:
            check_range(image.unsqueeze(0), row)
            image = image.clamp(0.0, 1.0)
        return image


@contextmanager
def seeded_globals(key: int) -> Iterator[None]:
    """Seed the global generators that transforms draw from; restore them afterwards."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    torch.default_generator.manual_seed(key)
    np.random.seed(key % 2**32)  # noqa: NPY002
    random.seed(key)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])


def dataset_labels(dataset: Any) -> Tensor:
    """The labels of all images: from the dataset's own list where it has one, as torchvision's do;
    else every image is read once."""
    labels = _listed(dataset)
    if labels is not None and _confirmed(dataset, labels):
        return labels
    with seeded_globals(0):
        return torch.tensor([label_of(dataset[row], row) for row in range(len(dataset))])


def _listed(dataset: Any) -> Tensor | None:
    """The labels that a dataset keeps as an attribute, if it does."""
    if isinstance(dataset, Subset):
        whole = _listed(dataset.dataset)
        return None if whole is None else whole[torch.as_tensor(dataset.indices)]
    if isinstance(dataset, ConcatDataset):
        parts = [_listed(part) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        return torch.cat(known) if len(known) == len(parts) else None
    if isinstance(dataset, Tensors):
        return dataset.tensors[1]
    for name in LABELS:
        try:
            labels = torch.as_tensor(getattr(dataset, name, None))
        except (TypeError, ValueError, RuntimeError):
            continue
        if labels.shape == (len(dataset),) and not labels.is_floating_point():
            return labels.to(torch.int64)
    return None


def _confirmed(dataset: Any, labels: Tensor) -> bool:
    """Whether the dataset returns these labels: it may transform them."""
    rows = torch.linspace(0, len(dataset) - 1, min(CHECKED, len(dataset))).long().tolist()
    with seeded_globals(0):
        return all(label_of(dataset[row], row) == int(labels[row]) for row in rows)


def _collected(loader: Iterable[Any], classes: int | None, names: Sequence[str]) -> ImageData:
    images, labels = [], []
    for batch in loader:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ValueError("the data loader must return batches of (images, labels)")
        images.append(batch[0].detach().cpu())
        labels.append(torch.as_tensor(batch[1]).cpu())
    if not images:
        raise ValueError("the data loader returns no batches")
    names = names or tuple(map(str, getattr(loader.dataset, "classes", ()) or ()))  # type: ignore[attr-defined]
    return ImageData.of(torch.cat(images), torch.cat(labels), classes=classes, names=names)


def _pair(item: Any, row: int) -> tuple[Any, Any]:
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    raise ValueError(
        f"item {row} of the dataset is a {type(item).__name__}: must be (image, label)"
    )


def label_of(item: Any, row: int) -> int:
    """The label of an (image, label) pair; `row` numbers it in errors."""
    label = _pair(item, row)[1]
    try:
        return int(label)
    except (TypeError, ValueError):
        raise ValueError(
            f"the label of item {row} is a {type(label).__name__}: must be an integer"
        ) from None


def image_of(item: Any, row: int) -> Tensor:
    """A tensor (channels, height, width) from a tensor, an array or a picture."""
    image = _pair(item, row)[0]
    if not isinstance(image, Tensor):
        image = torch.from_numpy(np.array(image))
        if image.dim() == 3 and image.shape[2] in (1, 3):  # as PIL and numpy store them
            image = image.permute(2, 0, 1)
    if image.dim() == 2:
        image = image.unsqueeze(0)
    if image.dim() != 3:
        raise ValueError(
            f"image {row} has shape {tuple(image.shape)}: must be (channels, height, width)"
        )
    return image if image.dtype == torch.uint8 else as_floats(image).float()


def _described(image: Tensor) -> str:
    return f"{tuple(image.shape)} {str(image.dtype).removeprefix('torch.')}"
