"""Decode published files to arrays, in memory: nothing is unpacked to disk, no pickle is read.

The bytes are untrusted: every length is checked before it is used, decompression stops one byte
past the expected size, and malformed input raises a ValueError that says what is wrong.
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
from typing import IO, Any, TypeAlias

from dat.core.lazy import numpy as np

NAMES = ("x_train", "y_train", "x_test", "y_test")
SLACK = 16 << 20
"""Bytes that an archive may hold besides the requested files: licenses, headers, padding."""
MOST_PIXELS = 16 << 20
"""Maximum size of a sprite; those of CIFAR-10 have 1,024 x 10,000 pixels."""

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Arrays = dict[str, Array]
"""The four NAMES: images are uint8 (n, channels, height, width), labels are int64 (n,)."""
Contents = Mapping[str, bytes]
"""File contents by file name, without folders."""


def gunzip(raw: bytes, limit: int, what: str) -> bytes:
    """Decompress to at most `limit` bytes."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
            data = file.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{what}: invalid gzip data ({error})") from None
    if len(data) > limit:
        raise ValueError(f"{what}: decompresses to more than the expected {limit:,} bytes")
    return data


class _Bounded:
    """A stream that raises once it is read past its limit."""

    def __init__(self, file: gzip.GzipFile, limit: int) -> None:
        self.file, self.limit, self.left = file, limit, limit

    def read(self, size: int) -> bytes:
        block = self.file.read(min(size, self.left + 1))
        self.left -= len(block)
        if self.left < 0:
            raise ValueError(f"decompresses to more than the expected {self.limit:,} bytes")
        return block


def members(file: IO[bytes], sizes: Mapping[str, int], what: str) -> dict[str, bytes]:
    """The files of a .tar.gz named in `sizes`, each of at most that many bytes, in one pass."""
    contents: dict[str, bytes] = {}
    names: list[str] = []
    try:
        with gzip.GzipFile(fileobj=file) as plain:
            stream = _Bounded(plain, sum(sizes.values()) + SLACK)
            with tarfile.open(fileobj=stream, mode="r|") as tar:  # type: ignore[call-overload]
                for member in tar:
                    _refuse_unsafe(member)
                    names.append(member.name)
                    if member.isfile() and member.name in sizes:
                        contents[member.name] = _read(tar, member, sizes[member.name], contents)
            while stream.read(1 << 16):  # to the end, where gzip stores its checksum
                pass
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise ValueError(f"{what}: not a valid .tar.gz archive ({error})") from None
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    missing = [name for name in sizes if name not in contents]
    if missing:
        raise ValueError(f"{what}: does not contain {missing[0]} (it starts with {names[:2]})")
    return contents


def _refuse_unsafe(member: tarfile.TarInfo) -> None:
    """Nothing is unpacked to disk, but an archive with unsafe members is not the published one."""
    path = PurePosixPath(member.name)
    if path.is_absolute():
        reason = "an absolute path"
    elif ".." in path.parts:
        reason = "a path that leads outside"
    elif member.issym() or member.islnk():
        reason = "a link"
    elif not (member.isdir() or member.isfile()) or member.issparse():
        reason = "neither a regular file nor a folder"
    else:
        return
    raise ValueError(f"refused: it contains {member.name!r}, {reason}")


def _read(
    tar: tarfile.TarFile, member: tarfile.TarInfo, limit: int, contents: Mapping[str, bytes]
) -> bytes:
    if member.name in contents:
        raise ValueError(f"contains {member.name!r} twice")
    if member.size > limit:
        raise ValueError(f"{member.name!r} has {member.size:,} bytes, expected at most {limit:,}")
    file = tar.extractfile(member)
    assert file is not None  # the member is a regular file
    data = file.read(limit + 1)
    if len(data) != member.size:
        raise ValueError(f"{member.name!r} is truncated")
    return data


def idx(raw: bytes, what: str) -> Array:
    """MNIST's format: 0, 0, 8 (uint8), the number of dimensions, the dimensions, the data."""
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or raw[3] not in (1, 3):
        raise ValueError(f"{what}: not an idx file of uint8 (it starts with {raw[:4].hex()})")
    header = 4 + 4 * raw[3]
    if len(raw) < header:
        raise ValueError(f"{what}: truncated after {len(raw)} bytes")
    shape = struct.unpack(f">{raw[3]}I", raw[4:header])
    expected = header + math.prod(shape)
    if len(raw) != expected:
        raise ValueError(f"{what}: has {len(raw):,} bytes, its header says {expected:,}")
    return np.frombuffer(raw, np.uint8)[header:].reshape(shape)


def idx_set(contents: Contents) -> Arrays:
    """The four files of MNIST and of datasets in its format."""
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
    """CIFAR's binary format: each row holds the labels, the finest last, then the image planes."""
    width = labels + math.prod(shape)

    def rows(name: str) -> Array:
        raw = contents[name]
        if not raw or len(raw) % width:
            raise ValueError(
                f"{name}: {len(raw):,} bytes, not a multiple of the row size {width:,}"
            )
        return np.frombuffer(raw, np.uint8).reshape(-1, width)

    arrays: Arrays = {}
    for split, names in (("train", train), ("test", test)):
        table = np.concatenate([rows(name) for name in names])
        arrays[f"x_{split}"] = table[:, labels:].reshape(-1, *shape)
        arrays[f"y_{split}"] = table[:, labels - 1].astype(np.int64)
    return arrays


def sprite(raw: bytes, what: str, side: int = 32) -> Array:
    """A PNG that stores one image per row: side x side RGB pixels."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(raw), formats=["PNG"])  # reads only the header
            width, height = picture.size
            if picture.mode != "RGB" or width != side**2 or width * height > MOST_PIXELS:
                raise ValueError(f"{width} x {height} pixels of {picture.mode}")
            pixels = np.asarray(picture)
    except Exception as error:  # Pillow raises many types on broken files
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
    """Sprites of the training and test images, and a JSON list of labels for each."""
    arrays: Arrays = {}
    for split, names, label in (("train", train, labels[0]), ("test", test, labels[1])):
        arrays[f"x_{split}"] = np.concatenate([sprite(contents[n], n, side) for n in names])
        arrays[f"y_{split}"] = _numbers(_json(contents[label], label), label).astype(np.int64)
    return arrays


def class_set(contents: Contents, *, classes: Sequence[str], train: int, side: int = 28) -> Arrays:
    """One JSON file per class, {"data": [pixels of an image, ...]}, training and test merged.

    Empty rows are skipped. The split is ours and fixed: the first `train` images of each class are
    for training, the rest for testing. Classes alternate, so that any range of rows has them all.
    """
    images = [_class(contents[name], name, side) for name in classes]
    if len({len(of_class) for of_class in images}) > 1 or len(images[0]) <= train:
        counts = ", ".join(str(len(of_class)) for of_class in images)
        raise ValueError(f"images per class are {counts}: must be equal and above {train:,}")
    interleaved = np.stack(images, axis=1)
    labels = np.tile(np.arange(len(classes), dtype=np.int64), (len(interleaved), 1))
    arrays: Arrays = {}
    for split, rows in (("train", slice(train)), ("test", slice(train, None))):
        arrays[f"x_{split}"] = interleaved[rows].reshape(-1, 1, side, side)
        arrays[f"y_{split}"] = labels[rows].reshape(-1)
    return arrays


def _class(raw: bytes, what: str, side: int) -> Array:
    document = _json(raw, what)
    rows = document.get("data") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError(f'{what}: must be {{"data": [[pixels], ...]}}')
    images = _numbers([row for row in rows if row], what)
    if images.ndim != 2 or images.shape[1] != side**2 or images.min() < 0 or images.max() > 255:
        raise ValueError(f"{what}: must be rows of {side**2} bytes, got {images.shape}")
    return images.astype(np.uint8)


def _json(raw: bytes, what: str) -> object:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what}: not JSON ({error})") from None


def _numbers(values: object, what: str) -> Array:
    """An array of integers from a list, or from lists of equal length."""
    try:
        array = np.array(values)
    except ValueError:
        raise ValueError(f"{what}: rows differ in length") from None
    if array.dtype.kind != "i" or not array.size:
        raise ValueError(f"{what}: must be integers")
    return array
