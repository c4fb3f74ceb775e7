"""The well-known datasets, whose shapes need no data."""

from __future__ import annotations

from typing import NamedTuple

from dat.data.catalog import CATALOG


class DatasetShape(NamedTuple):
    """What a plan needs to know of a dataset."""

    classes: int
    image: tuple[int, int, int]
    total: int
    """Images in the training set."""


KNOWN_DATASETS = {
    "imagenet": DatasetShape(1000, (3, 224, 224), 1_281_167),
    "digits": DatasetShape(10, (1, 8, 8), 1_437),
} | {
    name: DatasetShape(len(dataset.classes), dataset.shape, sum(dataset.train))
    for name, dataset in CATALOG.items()
}
"""Datasets that can be planned with without being on this machine."""
