"""Published files to arrays, in memory: nothing is unpacked to disk and no pickle is ever read.

The bytes come from elsewhere. So a length is checked before it is believed, unpacking stops one
byte past what is expected, and whatever is malformed is a ValueError that says what is wrong.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import struct
import tarfile
import warnings
import zlib
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import IO, Any

import numpy as np
from PIL import Image

NAMES = ("x_train", "y_train", "x_test", "y_test")
SLACK = 16 << 20
"""Bytes that an archive may hold beside the files asked for: licences, headers, padding."""
MOST_PIXELS = 16 << 20
"""Of one sprite; CIFAR-10's have 1,024 x 10,000."""

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = dict[str, Array]
"""The four of NAMES: images are uint8 (n, channels, height, width), labels are int64 (n,)."""
Contents = Mapping[str, bytes]
"""Files by their names, folders left out."""


def gunzip(raw: bytes, limit: int, what: str) -> bytes:
    """Unpacked, if that is at most `limit` bytes."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
            data = file.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{what}: broken gzip ({error})") from None
    if len(data) > limit:
        raise ValueError(f"{what}: unpacks to more than the {limit:,} bytes expected")
    return data


class _Bounded:
    """A stream that ends in an error past its limit, however much it would unpack to."""

    def __init__(self, file: gzip.GzipFile, limit: int) -> None:
        self.file, self.limit, self.left = file, limit, limit

    def read(self, size: int) -> bytes:
        block = self.file.read(min(size, self.left + 1))
        self.left -= len(block)
        if self.left < 0:
            raise ValueError(f"unpacks to more than the {self.limit:,} bytes expected")
        return block


def members(file: IO[bytes], sizes: Mapping[str, int], what: str) -> dict[str, bytes]:
    """Files of a .tar.gz by their exact names, each of at most so many bytes; read in one pass."""
    found: dict[str, bytes] = {}
    seen: list[str] = []
    try:
        with gzip.GzipFile(fileobj=file) as plain:
            stream = _Bounded(plain, sum(sizes.values()) + SLACK)
            with tarfile.open(fileobj=stream, mode="r|") as tar:  # type: ignore[call-overload]
                for member in tar:
                    _refuse_unsafe(member)
                    seen.append(member.name)
                    if member.isfile() and member.name in sizes:
                        found[member.name] = _read(tar, member, sizes[member.name], found)
            while stream.read(1 << 16):  # to the end, where gzip keeps its own checksum
                pass
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise ValueError(f"{what}: broken or not a .tar.gz archive ({error})") from None
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    missing = [name for name in sizes if name not in found]
    if missing:
        raise ValueError(f"{what}: holds no {missing[0]} (it begins with {seen[:2]})")
    return found


def _refuse_unsafe(member: tarfile.TarInfo) -> None:
    """Nothing is unpacked to disk; yet an archive that tries such a thing is not what it says."""
    path = PurePosixPath(member.name)
    if path.is_absolute():
        why = "an absolute path"
    elif ".." in path.parts:
        why = "a path that leads outside"
    elif member.issym() or member.islnk():
        why = "a link"
    elif not (member.isdir() or member.isfile()) or member.issparse():
        why = "neither a plain file nor a folder"
    else:
        return
    raise ValueError(f"refused, for it holds {member.name!r}: {why}")


def _read(
    tar: tarfile.TarFile, member: tarfile.TarInfo, limit: int, found: Mapping[str, bytes]
) -> bytes:
    if member.name in found:
        raise ValueError(f"holds {member.name!r} twice")
    if member.size > limit:
        raise ValueError(f"{member.name!r} has {member.size:,} bytes, expected at most {limit:,}")
    file = tar.extractfile(member)
    assert file is not None  # a plain file has one
    data = file.read(limit + 1)
    if len(data) != member.size:
        raise ValueError(f"{member.name!r} is cut off")
    return data


def idx(raw: bytes, what: str) -> Array:
    """MNIST's own format: 0, 0, 8 for bytes, the number of dimensions, the dimensions, the data."""
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or raw[3] not in (1, 3):
        raise ValueError(f"{what}: not an idx file of bytes (it begins with {raw[:4].hex()})")
    header = 4 + 4 * raw[3]
    if len(raw) < header:
        raise ValueError(f"{what}: cut off after {len(raw)} bytes")
    shape = struct.unpack(f">{raw[3]}I", raw[4:header])
    promised = header + math.prod(shape)
    if len(raw) != promised:
        raise ValueError(f"{what}: has {len(raw):,} bytes, its header promises {promised:,}")
    return np.frombuffer(raw, np.uint8)[header:].reshape(shape)


def idx_set(contents: Contents) -> Arrays:
    """The four files of MNIST and of those that took its form."""
    arrays: Arrays = {}
    for split, prefix in (("train", "train"), ("test", "t10k")):
        images = idx(contents[f"{prefix}-images-idx3-ubyte"], f"{prefix}-images-idx3-ubyte")
        labels = idx(contents[f"{prefix}-labels-idx1-ubyte"], f"{prefix}-labels-idx1-ubyte")
        if images.ndim != 3 or labels.ndim != 1:
            raise ValueError(
                f"{prefix}: images have {images.ndim} dimensions, labels {labels.ndim}"
            )
        arrays[f"x_{split}"] = images[:, None]
        arrays[f"y_{split}"] = labels.astype(np.int64)
    return arrays


def row_set(
    contents: Contents,
    *,
    train: Sequence[str],
    test: Sequence[str],
    labels: int = 1,
    shape: tuple[int, int, int] = (3, 32, 32),
) -> Arrays:
    """CIFAR's binary form: a row is its labels, the finest last, then the planes of the image."""
    width = labels + math.prod(shape)

    def rows(name: str) -> Array:
        raw = contents[name]
        if not raw or len(raw) % width:
            raise ValueError(f"{name}: {len(raw):,} bytes are no whole number of rows of {width:,}")
        return np.frombuffer(raw, np.uint8).reshape(-1, width)

    arrays: Arrays = {}
    for split, names in (("train", train), ("test", test)):
        table = np.concatenate([rows(name) for name in names])
        arrays[f"x_{split}"] = table[:, labels:].reshape(-1, *shape)
        arrays[f"y_{split}"] = table[:, labels - 1].astype(np.int64)
    return arrays


def sprite(raw: bytes, what: str, side: int = 32) -> Array:
    """A PNG with one image in each of its rows: side x side RGB pixels."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(raw), formats=["PNG"])  # only its header so far
            width, height = picture.size
            if picture.mode != "RGB" or width != side**2 or width * height > MOST_PIXELS:
                raise ValueError(f"{width} x {height} pixels of {picture.mode}")
            pixels = np.asarray(picture)
    except Exception as error:  # whatever a broken picture makes Pillow raise
        raise ValueError(f"{what}: not a sprite of {side} x {side} RGB images ({error})") from None
    return np.ascontiguousarray(pixels.reshape(-1, side, side, 3).transpose(0, 3, 1, 2))


def sprite_set(
    contents: Contents,
    *,
    train: Sequence[str],
    test: Sequence[str],
    labels: tuple[str, str],
    side: int = 32,
) -> Arrays:
    """Sprites of the training and of the test images, and a JSON list of labels for either."""
    arrays: Arrays = {}
    for split, names, label in (("train", train, labels[0]), ("test", test, labels[1])):
        arrays[f"x_{split}"] = np.concatenate([sprite(contents[n], n, side) for n in names])
        arrays[f"y_{split}"] = _numbers(_json(contents[label], label), label).astype(np.int64)
    return arrays


def class_set(contents: Contents, *, classes: Sequence[str], train: int, side: int = 28) -> Arrays:
    """A JSON file for each class, {"data": [pixels of an image, ...]}, training and test merged.

    Rows that are empty are no images. The split is ours and fixed: of each class the first `train`
    images are for training, the rest for test; the classes take turns, so that any stretch of rows
    has them all.
    """
    images = [_class(contents[name], name, side) for name in classes]
    if len({len(one) for one in images}) > 1 or len(images[0]) <= train:
        counts = ", ".join(str(len(one)) for one in images)
        raise ValueError(f"images by class are {counts}: must be equally many, over {train:,}")
    turns = np.stack(images, axis=1)
    labels = np.tile(np.arange(len(classes), dtype=np.int64), (len(turns), 1))
    arrays: Arrays = {}
    for split, part in (("train", slice(train)), ("test", slice(train, None))):
        arrays[f"x_{split}"] = turns[part].reshape(-1, 1, side, side)
        arrays[f"y_{split}"] = labels[part].reshape(-1)
    return arrays


def _class(raw: bytes, what: str, side: int) -> Array:
    found = _json(raw, what)
    rows = found.get("data") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError(f'{what}: must be {{"data": [[pixels], ...]}}')
    images = _numbers([row for row in rows if row], what)
    if images.ndim != 2 or images.shape[1] != side**2 or images.min() < 0 or images.max() > 255:
        raise ValueError(f"{what}: must be rows of {side**2} bytes, found {images.shape}")
    return images.astype(np.uint8)


def _json(raw: bytes, what: str) -> object:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what}: not JSON ({error})") from None


def _numbers(values: object, what: str) -> Array:
    """Whole numbers in a list, or in lists of one length."""
    try:
        array = np.array(values)
    except ValueError:
        raise ValueError(f"{what}: rows are of different lengths") from None
    if array.dtype.kind != "i" or not array.size:
        raise ValueError(f"{what}: must be whole numbers")
    return array
