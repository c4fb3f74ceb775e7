"""A folder of pictures, one sub-folder a class.

Either `train` with `test` or `val` beside it, as ImageNet has it, or the classes' folders alone,
of which a fixed share is kept for testing.
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

from dat.data.images import ImageData
from dat.data.pictures import PICTURES, Encoded, Files, OddSize, Pictures, picture_size, threads
from dat.data.place import cache_folder
from dat.data.stored import CHUNK
from dat.files import write_whole
from dat.rng import generator

TESTS = ("test", "val", "valid", "validation")
LOOKS = 500
"""Pictures whose headers are looked at for their sizes."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How pictures become images."""

    size: int | None = None
    """Pixels a side; none: as they are, if they are all alike."""
    resize: int | None = None
    """Pixels of the shorter side before the middle is cut out."""
    memory: float = 2.0
    """GiB of images that are read once and kept; larger sets stay on disk until drawn."""
    corrupt: str = "stop"
    """What becomes of a picture that cannot be read: `stop` or `skip`."""
    random_crops: bool = False
    """Training pictures are cut out at random, so they stay files."""
    test_share: float = 0.2
    """What is kept for testing where no test set is."""


@dataclass(frozen=True)
class Listing:
    """Pictures and their classes."""

    encoded: Encoded
    labels: Tensor
    names: tuple[str, ...]

    def take(self, rows: Tensor) -> Listing:
        return Listing(self.encoded.take(rows.tolist()), self.labels[rows], self.names)


def is_picture_folder(path: Path) -> bool:
    """Folders within it, or within its `train`, hold pictures."""
    root = path / "train" if _is_split(path) else path
    return any(_pictures(sub) for sub in _folders(root))


def _is_split(path: Path) -> bool:
    """`train` may be a class among others, of things on rails."""
    inside = {folder.name for folder in _folders(path)}
    return "train" in inside and (bool(inside & set(TESTS)) or len(inside) == 1)


def list_folder(path: Path, test_share: float) -> tuple[Listing, Listing]:
    """Training and test pictures."""
    if not _is_split(path):
        return split_listing(list_classes(path), test_share)
    tests = [path / name for name in TESTS if (path / name).is_dir()]
    if not tests:
        raise ValueError(f"{path}: has train but none of {', '.join(TESTS)} beside it")
    train = list_classes(path / "train")
    return train, list_classes(tests[0], train.names)


def list_classes(root: Path, known: tuple[str, ...] | None = None) -> Listing:
    """The pictures of a folder, one sub-folder a class."""
    folders = _folders(root)
    names = tuple(folder.name for folder in folders) if known is None else known
    if not folders:
        flat = ", but pictures: sort them into one folder a class" if _pictures(root) else ""
        raise ValueError(f"{root}: holds no folders, one a class{flat}")
    strange = [folder.name for folder in folders if folder.name not in names]
    if strange:
        raise ValueError(f"{root}: class {strange[0]} has no folder among the training pictures")
    files, labels = [], []
    for folder in folders:
        found = _pictures(folder)
        if not found:
            kinds = ", ".join(PICTURES)
            raise ValueError(f"{folder}: an empty class, no picture in it ({kinds}); remove it")
        files += [f"{folder.name}/{name}" for name in found]
        labels += [names.index(folder.name)] * len(found)
    return Listing(Files(root, files), torch.tensor(labels), names)


def _folders(root: Path) -> list[Path]:
    try:
        return sorted(it for it in root.iterdir() if it.is_dir() and not it.name.startswith("."))
    except OSError as error:
        raise ValueError(f"{root}: cannot be read ({error.strerror})") from None


def _pictures(folder: Path) -> list[str]:
    """The pictures in it and below, by their names within it."""
    try:
        inside = sorted(folder.iterdir())
    except OSError as error:
        raise ValueError(f"{folder}: cannot be read ({error.strerror})") from None
    found = []
    for it in inside:
        if it.name.startswith("."):
            continue
        if it.suffix.lower() in PICTURES:
            found.append(it.name)
        elif it.is_dir():
            found += [f"{it.name}/{name}" for name in _pictures(it)]
    return found


def split_listing(listing: Listing, share: float) -> tuple[Listing, Listing]:
    """A fixed share of every class."""
    order = torch.randperm(len(listing.labels), generator=generator(0, "folder-split"))
    test = torch.zeros(len(order), dtype=torch.bool)
    for label in range(len(listing.names)):
        own = order[listing.labels[order] == label]
        test[own[: round(share * len(own))]] = True
    if not test.any() or test.all():
        raise ValueError(
            f"data.test_share = {share:g}: of {len(order)} pictures it leaves none to "
            f"{'train' if test.all() else 'test'} on"
        )
    return tuple(listing.take(rows.nonzero().squeeze(1)) for rows in (~test, test))  # type: ignore[return-value]


def read_pictures(
    listings: Sequence[Listing],
    reading: Reading,
    *,
    channels: int | None = None,
    shape: tuple[int, tuple[int, int]] | None = None,
) -> list[ImageData]:
    """The sets, of one shape, the first to train on; decoded now if they are small together."""
    views = view_pictures(listings, reading, channels=channels, shape=shape)
    small = sum(it.shape.numel() for it in views) <= reading.memory * 2**30
    sets = []
    for number, (listing, pictures) in enumerate(zip(listings, views, strict=True)):
        labels, names = listing.labels, listing.names
        if reading.corrupt == "skip":
            fine = _fine(pictures)
            pictures, labels = pictures.take(fine), labels[fine]
        whole = reading.random_crops and number == 0
        images = pictures[torch.arange(len(pictures))] if small and not whole else pictures
        sets.append(ImageData.of(images, labels, names=names, classes=len(names)))
    return sets


def view_pictures(
    listings: Sequence[Listing],
    reading: Reading,
    *,
    channels: int | None = None,
    shape: tuple[int, tuple[int, int]] | None = None,
) -> list[Pictures]:
    """The pictures as images of one shape, none decoded yet."""
    found, size = shape or _common_shape(listings, reading)
    exact = reading.size is None and shape is None
    return [
        Pictures(it.encoded, size, reading.resize, channels or found, exact=exact)
        for it in listings
    ]


def _common_shape(listings: Sequence[Listing], reading: Reading) -> tuple[int, tuple[int, int]]:
    """Channels and size, from some headers."""
    shapes = set()
    for listing in listings:
        step = max(1, len(listing.encoded) // LOOKS)
        for row in range(0, len(listing.encoded), step):
            try:
                shapes.add(picture_size(listing.encoded.read(row)))
            except (OSError, ValueError, SyntaxError):
                continue  # whether that is bad is for the one who decodes it to say
    if not shapes:
        raise ValueError(f"{listings[0].encoded.name(0)}: none of the pictures can be read")
    channels = max(shape[0] for shape in shapes)
    if reading.size is not None:
        return channels, (reading.size, reading.size)
    sizes = {shape[1:] for shape in shapes}
    if len(sizes) > 1:
        low, high = min(sizes), max(sizes)
        raise ValueError(
            f"pictures differ in size, e.g. {low[1]} x {low[0]} and {high[1]} x {high[0]}: set "
            "data.size to the pixels a side that they are to have, e.g. data.size=224"
        )
    return channels, next(iter(sizes))


def _fine(pictures: Pictures) -> Tensor:
    """The rows of those that can be read. Each is decoded once to know, and what was found is kept
    in the cache until a picture changes; of several workers one looks while the others wait."""
    cache = cache_folder() / "checked"
    cache.mkdir(parents=True, exist_ok=True)
    known = cache / f"{_state(pictures)}.json"
    with known.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not known.exists():
            broken = find_broken(pictures)
            for reason in broken.values():
                print(f"left out: {reason}", file=sys.stderr)
            write_whole(known, json.dumps(sorted(broken)).encode())
        rows = set(json.loads(known.read_text()))
    if rows:
        print(f"{len(rows)} of {len(pictures)} pictures are left out", file=sys.stderr)
    return torch.tensor([row for row in range(len(pictures)) if row not in rows], dtype=torch.int64)


def find_broken(pictures: Pictures) -> dict[int, str]:
    """Decode every picture; the rows of those that cannot be read, and why."""

    def look(row: int) -> tuple[int, str] | None:
        try:
            pictures.decode(row)
        except OddSize:
            raise
        except ValueError as error:
            return row, str(error).split("; remove it")[0]
        return None

    broken: dict[int, str] = {}
    with ThreadPoolExecutor(threads(64)) as pool:
        for rows in torch.arange(len(pictures)).split(CHUNK):
            broken |= dict(found for found in pool.map(look, rows.tolist()) if found)
    return broken


def _state(pictures: Pictures) -> str:
    """Which pictures they are, and the lengths and times of their files."""
    digest = hashlib.blake2b(digest_size=16)
    for path in pictures.encoded.paths():
        status = path.stat()
        digest.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
    for row in range(len(pictures)):
        digest.update(f"{pictures.encoded.name(row)}\n".encode())
    digest.update(str(pictures.shape).encode())
    return digest.hexdigest()
