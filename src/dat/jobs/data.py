"""The data jobs: describe a data set, or shard it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dat.data import ImageData, Partitions, ReadOptions, load
from dat.data.catalog import CATALOG
from dat.data.fetch import verify
from dat.data.folder import find_broken, view_pictures
from dat.data.sharding import (
    MANIFEST,
    Origin,
    check_arrays,
    is_sharded,
    read_manifest,
    write_shards,
)
from dat.data.sources import list_pictures

ACROSS = 10
"""Images per class on a contact sheet."""
SHEET_CLASSES = 20


def describe_data(
    name: str, reading: ReadOptions | None = None, *, check: bool = False
) -> dict[str, Any]:
    """Describe a data set; with `check`, decode every image and verify every checksum."""
    reading, path = reading or ReadOptions(), Path(name)
    broken = _check(name, path, reading) if check else []
    sharded = path.is_dir() and is_sharded(path)
    splits = load(name, replace(reading, corrupt="skip") if broken and not sharded else reading)
    train, test = splits.training, splits.test
    counts = _counts(train)
    channels, height, width = test.shape
    names = test.names or tuple(map(str, range(test.classes)))
    return {
        "name": name,
        "train": len(train),
        "test": len(test),
        "shape": [channels, height, width],
        "classes": test.classes,
        "mean": list(splits.mean),
        "std": list(splits.std),
        "stored": _stored(train),
        "parts": list(train.sizes) if isinstance(train, Partitions) else None,
        "counts": [
            {"class": name, "train": in_train, "test": in_test}
            for name, in_train, in_test in zip(names, counts, test.counts().tolist(), strict=True)
        ],
        "checked": check,
        "broken": broken,
    }


def _stored(train: ImageData | Partitions) -> str:
    if isinstance(train, Partitions):
        return f"{len(train.sizes)} parts"
    images = train.images
    kind = "in memory" if isinstance(images, torch.Tensor) else type(images).__name__.lower()
    return f"{kind}, {str(images.dtype).removeprefix('torch.')}"


def _counts(train: ImageData | Partitions) -> list[int]:
    if isinstance(train, ImageData):
        return train.counts().tolist()
    return list(train.totals)


def _check(name: str, path: Path, reading: ReadOptions) -> list[str]:
    """What cannot be decoded, or does not match its checksum."""
    if name in CATALOG:
        verify(name)
        return []
    if path.is_dir() and is_sharded(path):
        errors = []
        for manifest in sorted(path.glob(f"*/{MANIFEST}")):
            try:
                check_arrays(manifest.parent, read_manifest(manifest.parent), always=True)
            except ValueError as error:
                errors.append(str(error))
        return errors
    if path.suffix != ".parquet" and not (path.is_dir() and not (path / "x_train.npy").exists()):
        return []
    views = view_pictures(list_pictures(path, reading), reading)
    return [reason for view in views for reason in find_broken(view).values()]


def contact_sheet(name: str, file: Path, reading: ReadOptions | None = None) -> None:
    """Write a contact sheet: one row of training images per class."""
    from dat.report import image_grid

    splits = load(name, reading or ReadOptions())
    data = splits.test if isinstance(splits.training, Partitions) else splits.training
    names = data.names or tuple(map(str, range(data.classes)))
    rows = {}
    for label in range(min(data.classes, SHEET_CLASSES)):
        numbers = (data.labels == label).nonzero().squeeze(1)[:ACROSS]
        if len(numbers):
            rows[names[label]] = data.batch(numbers, torch.device("cpu"))[0]
    image_grid(file, rows)


def shard_data(
    name: str, out: Path, reading: ReadOptions, *, parts: int, by: str, alpha: float, seed: int
) -> dict[str, Any]:
    """Shard a data set; returns the contents of each part. Image files are not re-encoded."""
    splits = load(name, replace(reading, memory=0))
    origin = Origin(name, splits.train, splits.test, splits.mean, splits.std)
    folders = write_shards(origin, out, parts=parts, by=by, alpha=alpha, seed=seed)
    manifests = [read_manifest(folder) for folder in folders]
    return {
        "out": str(out),
        "by": by,
        "test": len(splits.test),
        "parts": [
            {
                "folder": folder.name,
                "images": manifest["images"],
                "counts": manifest["counts"],
            }
            for folder, manifest in zip(folders, manifests, strict=True)
        ],
    }
