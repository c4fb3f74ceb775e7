"""Datasets of the Hugging Face Hub: `data.name: hf/cifar10`, or a `datasets.Dataset`.

Needs `datasets` (pip install 'dat-robust[hf]'), which downloads and caches; no code of a dataset is
executed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from dat.data.columns import PictureColumn
from dat.data.folder import TESTS, Listing, split_listing
from dat.data.parquet import LABELS

PREFIX = "hf/"


class HubPictures(PictureColumn):
    """A column of a `datasets.Dataset`, the `source`."""

    def paths(self) -> Iterable[Path]:
        return (Path(file["filename"]) for file in self.source.cache_files)

    def _count(self) -> int:
        return len(self.source)

    def _encoded(self, row: int) -> object:
        value = self.source[row][self.column]
        raw = value.get("bytes")
        if raw is None and value.get("path"):
            raw = Path(value["path"]).read_bytes()
        return raw


def is_hub_dataset(data: object) -> bool:
    """Whether this is a `datasets.Dataset`, without importing the library."""
    cls = type(data)
    return cls.__module__.startswith("datasets.") and cls.__name__ == "Dataset"


def listing_of(table: Any) -> Listing:
    """The pictures and labels of a `datasets.Dataset`."""
    import datasets

    features = table.features
    images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    labels = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    labels += [name for name in LABELS if name in features and name not in labels]
    if not images or not labels:
        raise ValueError(
            f"has the columns {', '.join(features)}: needs one of pictures (datasets.Image) and "
            f"one of labels (datasets.ClassLabel, or integers called {', '.join(LABELS)})"
        )
    values = torch.as_tensor(table[labels[0]])
    if values.is_floating_point() or (values < 0).any():
        raise ValueError(f"{labels[0]} must be integers from 0, one per picture")
    kind = features[labels[0]]
    names = tuple(kind.names) if isinstance(kind, datasets.ClassLabel) else ()
    names = names or tuple(map(str, range(int(values.max()) + 1)))
    encoded = table.cast_column(images[0], datasets.Image(decode=False))
    return Listing(HubPictures(encoded, images[0]), values.to(torch.int64), names)


def list_hub(name: str, test_share: float) -> tuple[Listing, Listing]:
    """Training and test pictures of a dataset on the hub."""
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"data.name = {name}: needs datasets; run: pip install 'dat-robust[hf]'"
        ) from None
    try:
        splits = datasets.load_dataset(name.removeprefix(PREFIX))
    except Exception as error:  # the library raises many types
        reason = " ".join(str(error).split())
        raise ValueError(f"data.name = {name}: cannot be loaded ({reason})") from None
    if "train" not in splits:
        raise ValueError(
            f"data.name = {name}: has the splits {', '.join(splits)}, but no train split"
        )
    try:
        train = listing_of(splits["train"])
        test = next((splits[split] for split in TESTS if split in splits), None)
        return split_listing(train, test_share) if test is None else (train, listing_of(test))
    except ValueError as error:
        raise ValueError(f"data.name = {name}: {error}") from None
