"""Arrays in .npy and .npz files: read into memory, or memory-mapped if large and uncompressed."""

from __future__ import annotations

import io
import math
import struct
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from dat.data.images import ImageData
from dat.data.lazy_images import Images, MemoryMapped

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
MEMORY = 2.0
"""GiB up to which an array is read into memory by default."""
LOCAL_HEADER = 30
"""Bytes of a zip member's local header before its name."""
MAPPED_DTYPES = ("uint8", "float16", "float32", "float64")
Array = np.ndarray[Any, np.dtype[Any]]


def read_sets(path: Path, memory: float = MEMORY) -> tuple[ImageData, ImageData]:
    """Training and test set from an .npz file or a folder of .npy files.

    Arrays of up to `memory` GiB are read into memory, larger ones are memory-mapped.
    """
    try:
        arrays = _folder(path) if path.is_dir() else _archive(path, memory)
        labels = {name: as_labels(arrays[name], name) for name in ("y_train", "y_test")}
        classes = max(int(max(y.max(initial=0) for y in labels.values())) + 1, 1)
        return tuple(  # type: ignore[return-value]
            _dataset(as_images(arrays[f"x_{split}"], memory), labels[f"y_{split}"], classes, split)
            for split in ("train", "test")
        )
    except Exception as error:  # numpy raises many types on broken files
        raise ValueError(f"data.name = {path}: {error}") from None


def _dataset(images: Images, labels: Array, classes: int, split: str) -> ImageData:
    try:
        return ImageData.of(images, torch.from_numpy(labels), classes=classes)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{split}: {error}") from None


def as_images(array: MemoryMapped | Array, memory: float = MEMORY) -> Images:
    """Images in channels-first order, in memory if they fit."""
    if isinstance(array, MemoryMapped):
        fits = array.shape.numel() * array.dtype.itemsize <= memory * 2**30
        return array[torch.arange(len(array))] if fits else array
    images = torch.from_numpy(np.ascontiguousarray(array))
    if images.dim() == 4 and images.shape[3] in (1, 3) and images.shape[1] not in (1, 3):
        return images.permute(0, 3, 1, 2).contiguous()
    return images


def read_array(path: Path, names: tuple[str, ...]) -> Images:
    """The images of an .npy file, or of an .npz file under the first of `names` that it holds."""
    if not path.is_file():
        raise ValueError("no such file")
    try:
        if path.suffix == ".npy":
            return as_images(_mapped(path, 0) or np.load(path, allow_pickle=False))
        with zipfile.ZipFile(path) as archive:
            available = {Path(file).stem for file in archive.namelist()}
            name = next((name for name in names if name in available), None)
            if name is None:
                raise ValueError(f"contains none of {', '.join(names)}")
            return as_images(read_member(path, archive, name, MEMORY))
    except Exception as error:  # numpy raises many types on broken files
        raise ValueError(f"not an array of images ({error})") from None


def map_array(path: Path) -> MemoryMapped | Array:
    """An .npy file, memory-mapped if possible."""
    try:
        return _mapped(path, 0) or np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path}: {error}") from None


def as_labels(y: MemoryMapped | Array, name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Labels as int64; `name` is what errors call them."""
    if isinstance(y, MemoryMapped):
        raise ValueError(f"{name} has shape {y.sizes}: must be one label per image")
    if y.dtype.kind not in "iu":
        raise ValueError(f"{name} is {y.dtype}: labels must be integers")
    return y.astype(np.int64)


def _folder(path: Path) -> dict[str, MemoryMapped | Array]:
    missing = [f"{name}.npy" for name in ARRAYS if not (path / f"{name}.npy").is_file()]
    if missing:
        raise ValueError(f"missing: {', '.join(missing)}")
    arrays: dict[str, MemoryMapped | Array] = {}
    for name in ARRAYS:
        file = path / f"{name}.npy"
        arrays[name] = _mapped(file, 0) or np.load(file, allow_pickle=False)
    return arrays


def _archive(path: Path, memory: float) -> dict[str, MemoryMapped | Array]:
    if not path.is_file():
        raise ValueError("no such file")
    if not zipfile.is_zipfile(path):
        raise ValueError("not an .npz file; create one with numpy.savez")
    with zipfile.ZipFile(path) as archive:
        available = set(archive.namelist())
        missing = [name for name in ARRAYS if f"{name}.npy" not in available]
        if missing:
            raise ValueError(f"missing: {', '.join(missing)}; must contain {', '.join(ARRAYS)}")
        return {name: read_member(path, archive, name, memory) for name in ARRAYS}


def read_member(
    path: Path, archive: zipfile.ZipFile, name: str, memory: float
) -> MemoryMapped | Array:
    """Read the member, which verifies its checksum, or map it if it is large."""
    info = archive.getinfo(f"{name}.npy")
    if info.compress_type == zipfile.ZIP_STORED and info.file_size > memory * 2**30:
        with path.open("rb") as raw:
            raw.seek(info.header_offset)
            header = raw.read(LOCAL_HEADER)
        name_length, extra_length = struct.unpack("<HH", header[26:30])
        start = info.header_offset + LOCAL_HEADER + name_length + extra_length
        if mapped := _mapped(path, start):
            return mapped
    if info.file_size > memory * 2**30 and info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(
            f"{name} is compressed and {info.file_size / 2**30:.1f} GiB large; save it "
            "uncompressed with numpy.savez, or raise data.memory"
        )
    with archive.open(info) as member:
        array: Array = np.load(io.BytesIO(member.read()), allow_pickle=False)
        return array


def _mapped(path: Path, start: int) -> MemoryMapped | None:
    """The array that begins at byte `start`, if it can be mapped: uint8 or floats, in C order."""
    with path.open("rb") as raw:
        raw.seek(start)
        shape, fortran, dtype = _header(raw)
        offset = raw.tell()
        available = raw.seek(0, io.SEEK_END) - offset
    if fortran or dtype.hasobject or dtype.byteorder == ">" or dtype.name not in MAPPED_DTYPES:
        return None
    if len(shape) not in (3, 4) or 0 in shape:
        return None
    needed = math.prod(shape) * dtype.itemsize
    if available < needed:
        raise ValueError(f"truncated: {available} bytes, expected {needed}")
    return MemoryMapped(path, offset, dtype.name, tuple(shape))


def _header(raw: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(raw)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read_header is None:
        raise ValueError(f"unsupported .npy version {version}")
    return read_header(raw)
