"""A folder of pictures with one subfolder per class.

Either `train` and `test` (or `val`) folders as in ImageNet, or the class folders alone, of which a
fixed share is held out for testing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dat.core.files import atomic_write
from dat.core.rng import generator
from dat.data.cache_dir import cache_folder
from dat.data.images import ImageData
from dat.data.lazy_images import CHUNK
from dat.data.pictures import (
    PICTURES,
    Encoded,
    PictureFiles,
    Pictures,
    SizeMismatch,
    picture_size,
    threads,
)
from dat.data.reading import ReadOptions

TESTS = ("test", "val", "valid", "validation")
PROBED = 500
"""Pictures whose headers are read to determine the common size."""


@dataclass(frozen=True)
class Listing:
    """Encoded pictures with their labels and class names."""

    encoded: Encoded
    labels: Tensor
    names: tuple[str, ...]

    def take(self, rows: Tensor) -> Listing:
        return Listing(self.encoded.take(rows.tolist()), self.labels[rows], self.names)


def is_picture_folder(path: Path) -> bool:
    """Whether subfolders of the folder, or of its `train`, contain pictures."""
    root = path / "train" if _is_split(path) else path
    return any(_picture_names(folder) for folder in _folders(root))


def _is_split(path: Path) -> bool:
    """Whether there is a `train` folder that is not just one class among others."""
    names = {folder.name for folder in _folders(path)}
    return "train" in names and (bool(names & set(TESTS)) or len(names) == 1)


def list_folder(path: Path, test_share: float) -> tuple[Listing, Listing]:
    """The training and test pictures of a folder."""
    if not _is_split(path):
        return split_listing(list_classes(path), test_share)
    tests = [path / name for name in TESTS if (path / name).is_dir()]
    if not tests:
        raise ValueError(f"{path}: has a train folder, but no {' or '.join(TESTS)} folder")
    train = list_classes(path / "train")
    return train, list_classes(tests[0], train.names)


def list_classes(root: Path, known: tuple[str, ...] | None = None) -> Listing:
    """The pictures of a folder with one subfolder per class."""
    folders = _folders(root)
    names = tuple(folder.name for folder in folders) if known is None else known
    if not folders:
        hint = "; sort the pictures into one folder per class" if _picture_names(root) else ""
        raise ValueError(f"{root}: contains no class folders{hint}")
    unknown = [folder.name for folder in folders if folder.name not in names]
    if unknown:
        raise ValueError(f"{root}: class {unknown[0]} has no training pictures")
    files, labels = [], []
    for folder in folders:
        pictures = _picture_names(folder)
        if not pictures:
            kinds = ", ".join(PICTURES)
            raise ValueError(f"{folder}: contains no pictures ({kinds}); remove this class folder")
        files += [f"{folder.name}/{name}" for name in pictures]
        labels += [names.index(folder.name)] * len(pictures)
    return Listing(PictureFiles(root, files), torch.tensor(labels), names)


def _folders(root: Path) -> list[Path]:
    try:
        paths = sorted(root.iterdir())
        return [path for path in paths if path.is_dir() and not path.name.startswith(".")]
    except OSError as error:
        raise ValueError(f"{root}: cannot be read ({error.strerror})") from None


def _picture_names(folder: Path) -> list[str]:
    """The pictures in a folder and its subfolders, by relative path."""
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise ValueError(f"{folder}: cannot be read ({error.strerror})") from None
    names = []
    for path in paths:
        if path.name.startswith("."):
            continue
        if path.suffix.lower() in PICTURES:
            names.append(path.name)
        elif path.is_dir():
            names += [f"{path.name}/{name}" for name in _picture_names(path)]
    return names


def split_listing(listing: Listing, share: float) -> tuple[Listing, Listing]:
    """Training and test pictures, the latter a fixed share of every class."""
    order = torch.randperm(len(listing.labels), generator=generator(0, "folder-split"))
    test = torch.zeros(len(order), dtype=torch.bool)
    for label in range(len(listing.names)):
        own = order[listing.labels[order] == label]
        test[own[: round(share * len(own))]] = True
    if not test.any() or test.all():
        raise ValueError(
            f"data.test_share = {share:g}: leaves none of {len(order)} pictures for "
            f"{'training' if test.all() else 'testing'}"
        )
    return tuple(listing.take(rows.nonzero().squeeze(1)) for rows in (~test, test))  # type: ignore[return-value]


def read_pictures(
    listings: Sequence[Listing],
    reading: ReadOptions,
    *,
    channels: int | None = None,
    shape: tuple[int, tuple[int, int]] | None = None,
) -> list[ImageData]:
    """Datasets of one shape, the first one for training; decoded now if they fit in memory."""
    views = view_pictures(listings, reading, channels=channels, shape=shape)
    fits = sum(view.shape.numel() for view in views) <= reading.memory * 2**30
    datasets = []
    for number, (listing, pictures) in enumerate(zip(listings, views, strict=True)):
        labels, names = listing.labels, listing.names
        if reading.corrupt == "skip":
            readable = _readable_rows(pictures)
            pictures, labels = pictures.take(readable), labels[readable]
        cropped_later = reading.random_crops and number == 0
        images = pictures[torch.arange(len(pictures))] if fits and not cropped_later else pictures
        datasets.append(ImageData.of(images, labels, names=names, classes=len(names)))
    return datasets


def view_pictures(
    listings: Sequence[Listing],
    reading: ReadOptions,
    *,
    channels: int | None = None,
    shape: tuple[int, tuple[int, int]] | None = None,
) -> list[Pictures]:
    """The pictures as lazily decoded images of one shape."""
    common_channels, size = shape or _common_shape(listings, reading)
    exact = reading.size is None and shape is None
    return [
        Pictures(listing.encoded, size, reading.resize, channels or common_channels, exact=exact)
        for listing in listings
    ]


def _common_shape(listings: Sequence[Listing], reading: ReadOptions) -> tuple[int, tuple[int, int]]:
    """Channels and size, from a sample of the headers."""
    shapes = set()
    for listing in listings:
        step = max(1, len(listing.encoded) // PROBED)
        for row in range(0, len(listing.encoded), step):
            try:
                shapes.add(picture_size(listing.encoded.read(row)))
            except (OSError, ValueError, SyntaxError):
                continue  # reported when it is decoded, if at all
    if not shapes:
        raise ValueError(f"{listings[0].encoded.name(0)}: none of the pictures can be read")
    channels = max(shape[0] for shape in shapes)
    if reading.size is not None:
        return channels, (reading.size, reading.size)
    sizes = {shape[1:] for shape in shapes}
    if len(sizes) > 1:
        low, high = min(sizes), max(sizes)
        raise ValueError(
            f"pictures differ in size, e.g. {low[1]} x {low[0]} and {high[1]} x {high[0]}; set "
            "data.size to the side length in pixels that they are scaled to, e.g. data.size=224"
        )
    return channels, next(iter(sizes))


def _readable_rows(pictures: Pictures) -> Tensor:
    """The rows of the pictures that can be decoded.

    Every picture is decoded once, and the result is cached until a picture changes. With several
    workers, one of them checks while the others wait.
    """
    cache = cache_folder() / "checked"
    cache.mkdir(parents=True, exist_ok=True)
    checked = cache / f"{_fingerprint(pictures)}.json"
    with checked.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not checked.exists():
            broken = find_broken(pictures)
            for reason in broken.values():
                print(f"skipped: {reason}", file=sys.stderr)
            atomic_write(checked, json.dumps(sorted(broken)).encode())
        skipped = set(json.loads(checked.read_text()))
    if skipped:
        print(f"skipped {len(skipped)} of {len(pictures)} pictures", file=sys.stderr)
    readable = [row for row in range(len(pictures)) if row not in skipped]
    return torch.tensor(readable, dtype=torch.int64)


def find_broken(pictures: Pictures) -> dict[int, str]:
    """Decode every picture; returns the rows that cannot be read, with the reasons."""

    def check(row: int) -> tuple[int, str] | None:
        try:
            pictures.decode(row)
        except SizeMismatch:
            raise
        except ValueError as error:
            return row, str(error).split("; remove it")[0]
        return None

    broken: dict[int, str] = {}
    with ThreadPoolExecutor(threads(64)) as pool:
        for rows in torch.arange(len(pictures)).split(CHUNK):
            broken |= dict(failure for failure in pool.map(check, rows.tolist()) if failure)
    return broken


def _fingerprint(pictures: Pictures) -> str:
    """Hash of the pictures' names and of the sizes and times of their files."""
    digest = hashlib.blake2b(digest_size=16)
    for path in pictures.encoded.paths():
        status = path.stat()
        digest.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
    for row in range(len(pictures)):
        digest.update(f"{pictures.encoded.name(row)}\n".encode())
    digest.update(str(pictures.shape).encode())
    return digest.hexdigest()
