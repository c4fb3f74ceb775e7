"""Jobs about data: what there is, what is in it, dividing it into parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dat.data import SOURCES, ImageData, Parts, Reading, Splits, load
from dat.data.catalog import CATALOG
from dat.data.fetch import cached, verify
from dat.data.folder import find_broken, view_pictures
from dat.data.shards import MANIFEST, Origin, check_arrays, is_sharded, read_manifest, write_shards
from dat.data.sources import list_pictures

ACROSS = 10
"""Images of a class on a contact sheet."""
SHEET_CLASSES = 20


def standard_sets() -> list[dict[str, Any]]:
    """What can be had by its name."""
    rows = [{"name": name, "here": "built in"} | _brief(load(name)) for name in SOURCES]
    for row in rows:
        row["about"] = "scikit-learn's handwritten digits, 8 x 8"
    for name, published in CATALOG.items():
        folder = cached(name)
        rows.append(
            {
                "name": name,
                "images": f"{sum(published.train):,} + {sum(published.test):,}",
                "classes": len(published.classes),
                "here": str(folder) if folder else "-",
                "about": published.about,
            }
        )
    return rows


def _brief(splits: Splits) -> dict[str, Any]:
    return {
        "images": f"{len(splits.training):,} + {len(splits.test):,}",
        "classes": splits.test.classes,
    }


def described(name: str, reading: Reading | None = None, *, check: bool = False) -> dict[str, Any]:
    """What a set holds; with `check` every picture is decoded and every checksum compared."""
    reading, path = reading or Reading(), Path(name)
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
        "parts": list(train.sizes) if isinstance(train, Parts) else None,
        "counts": [
            {"class": name, "train": here, "test": there}
            for name, here, there in zip(names, counts, test.counts().tolist(), strict=True)
        ],
        "checked": check,
        "broken": broken,
    }


def _stored(train: ImageData | Parts) -> str:
    if isinstance(train, Parts):
        return f"{len(train.sizes)} parts"
    images = train.images
    kind = "in memory" if isinstance(images, torch.Tensor) else type(images).__name__.lower()
    return f"{kind}, {str(images.dtype).removeprefix('torch.')}"


def _counts(train: ImageData | Parts) -> list[int]:
    if isinstance(train, ImageData):
        return train.counts().tolist()
    return list(train.totals)


def _check(name: str, path: Path, reading: Reading) -> list[str]:
    """What cannot be read, or is not what it should be."""
    if name in CATALOG:
        verify(name)
        return []
    if path.is_dir() and is_sharded(path):
        found = []
        for it in sorted(path.glob(f"*/{MANIFEST}")):
            try:
                check_arrays(it.parent, read_manifest(it.parent), always=True)
            except ValueError as error:
                found.append(str(error))
        return found
    if path.suffix != ".parquet" and not (path.is_dir() and not (path / "x_train.npy").exists()):
        return []
    views = view_pictures(list_pictures(path, reading), reading)
    return [reason for it in views for reason in find_broken(it).values()]


def contact_sheet(name: str, file: Path, reading: Reading | None = None) -> None:
    """Some training images of each class, a row a class."""
    from dat.report import image_grid

    splits = load(name, reading or Reading())
    data = splits.test if isinstance(splits.training, Parts) else splits.training
    names = data.names or tuple(map(str, range(data.classes)))
    rows = {}
    for label in range(min(data.classes, SHEET_CLASSES)):
        own = (data.labels == label).nonzero().squeeze(1)[:ACROSS]
        if len(own):
            rows[names[label]] = data.batch(own, torch.device("cpu"))[0]
    image_grid(file, rows)


def divided(
    name: str, out: Path, reading: Reading, *, parts: int, by: str, alpha: float, seed: int
) -> dict[str, Any]:
    """Divide a set; what each part got. Pictures stay the files that they are."""
    splits = load(name, replace(reading, memory=0))
    origin = Origin(name, splits.train, splits.test, splits.mean, splits.std)
    folders = write_shards(origin, out, parts=parts, by=by, alpha=alpha, seed=seed)
    manifests = [read_manifest(folder) for folder in folders]
    return {
        "out": str(out),
        "by": by,
        "test": len(splits.test),
        "parts": [
            {"folder": folder.name, "images": it["images"], "counts": it["counts"]}
            for folder, it in zip(folders, manifests, strict=True)
        ],
    }
