"""Checkpoints: everything a run needs to resume as if it had never been interrupted.

RUN/checkpoints/00000120/state.safetensors       tensors that are the same on all workers
                         worker-1.safetensors    a worker's own tensors: error feedback, the images
                                                 of free AT, carried perturbations; in a sharded
                                                 run its shards, with their rows in the header
                         manifest.json           everything else, and every file's size and checksum

A checkpoint is written to a temporary folder, synced to disk and renamed: either it exists
completely, or not at all. Reading one executes no code and refuses a file with a single wrong byte.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from dat.core.files import atomic_write, sync_folder
from dat.distributed import TensorShard, shard_of
from dat.train.resharding import SavedShards, find_shards, shard_metadata

FORMAT, SHARDED = 1, 2
"""Format numbers; the second has shards of tensors in the workers' files."""
MANIFEST = "manifest.json"
STATE = "state.safetensors"
Tensors = dict[str, Tensor]


class InvalidCheckpoint(ValueError):
    """The checkpoint is damaged or incomplete, or does not fit the run."""


def pack(value: Any, tensors: Tensors, name: str = "") -> Any:
    """Convert to JSON types. Tensors are added to `tensors`; dicts with other keys than strings
    become lists of items."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"$tensor" if shard_of(value) is None else "$parts": name}
    if isinstance(value, dict):
        packed = {key: pack(item, tensors, f"{name}/{key}") for key, item in value.items()}
        if all(isinstance(key, str) and not key.startswith("$") for key in packed):
            return packed
        return {"$items": [[key, item] for key, item in packed.items()]}
    if isinstance(value, list | tuple):
        items = [pack(item, tensors, f"{name}/{number}") for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{name}: a {type(value).__name__} cannot be saved in a checkpoint")


def unpack(value: Any, tensors: Mapping[str, Tensor | SavedShards]) -> Any:
    """The inverse of `pack`."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value or "$parts" in value:
        return tensors[value["$tensor" if "$tensor" in value else "$parts"]]
    if "$items" in value:
        return {key: unpack(item, tensors) for key, item in value["$items"]}
    if "$tuple" in value:
        return tuple(unpack(item, tensors) for item in value["$tuple"])
    return {key: unpack(item, tensors) for key, item in value.items()}


def write(
    root: Path,
    step: int,
    packed: Any,
    tensors: Tensors,
    owners: int,
    *,
    kind: int = FORMAT,
    number: int = 0,
    timeout: float = 300.0,
) -> Path:
    """Write rank 0's share: the common tensors and, once the files of `owners` workers are there,
    the manifest; then give the checkpoint its final name. Wait `timeout` seconds for those files.

    `number` counts the checkpoints of a run: the last step of an epoch may have two, and a faster
    worker may already be writing the second."""
    folder, partial_folder = root / f"{step:08d}", _partial_folder(root, step, number)
    partial_folder.mkdir(parents=True, exist_ok=True)
    _write_synced(partial_folder / STATE, save(tensors))
    _wait_for_workers(partial_folder, owners, timeout)
    files = {}
    for path in sorted(partial_folder.glob("*.safetensors")):
        files[path.name] = {"size": path.stat().st_size, "blake2b": _digest_file(path)}
    body = {"format": kind, "step": step, "files": files, "state": packed}
    manifest = json.dumps(body | {"blake2b": _signature(body)})
    _write_synced(partial_folder / MANIFEST, manifest.encode())
    sync_folder(partial_folder)
    if folder.exists():  # the step is repeated, after its checkpoint could not be read
        shutil.rmtree(folder)
    partial_folder.rename(folder)
    sync_folder(root)
    return folder


def write_worker(
    root: Path,
    step: int,
    rank: int,
    tensors: Tensors,
    shards: Mapping[str, TensorShard] | None = None,
    *,
    number: int = 0,
) -> None:
    """Write a worker's own tensors; `shards` says which rows the sharded ones are."""
    folder = _partial_folder(root, step, number)
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / f"worker-{rank}.safetensors", save(tensors, shard_metadata(shards or {})))


def _partial_folder(root: Path, step: int, number: int) -> Path:
    return root / f".{step:08d}-{number}.partial"


def _wait_for_workers(folder: Path, owners: int, timeout: float) -> None:
    start = time.monotonic()
    while len(list(folder.glob("worker-*.safetensors"))) < owners:
        if time.monotonic() - start > timeout:
            raise OSError(f"the other workers wrote no files within {timeout:g} s (comm.timeout)")
        time.sleep(0.02)


def copy_to_cpu(tensors: Tensors) -> Tensors:
    """Copies that stay unchanged while training continues."""
    return {
        name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()
    }


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _digest_file(path: Path) -> str:
    """The digest of a file, without reading all of it into memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()


def _signature(body: dict[str, Any]) -> str:
    return _digest(json.dumps(body, sort_keys=True).encode())


def all_checkpoints(root: Path) -> list[Path]:
    """The folders of all checkpoints, latest first, valid or not."""
    folders = [path for path in root.glob("*") if path.name.isdecimal()] if root.is_dir() else []
    return sorted(folders, key=lambda folder: int(folder.name), reverse=True)


def has_checkpoint(run: Path) -> bool:
    """Whether a run can be resumed."""
    return bool(all_checkpoints(run / "checkpoints"))


def read(folder: Path) -> tuple[Any, Iterator[Path]]:
    """The state common to all workers, and the workers' own files. Every file's checksum is
    verified."""
    manifest = _manifest(folder)
    for name, written in manifest["files"].items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise InvalidCheckpoint(f"{path}: missing")
        if path.stat().st_size != written["size"] or _digest_file(path) != written["blake2b"]:
            raise InvalidCheckpoint(f"{path}: damaged (the checksum differs)")
    worker_files = [folder / name for name in sorted(manifest["files"]) if name != STATE]
    try:
        if STATE not in manifest["files"]:
            raise KeyError(STATE)
        tensors = load((folder / STATE).read_bytes())
        shards = find_shards(worker_files) if manifest["format"] == SHARDED else {}
        state = unpack(manifest["state"], {**tensors, **shards})
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InvalidCheckpoint(f"{folder}: not a checkpoint ({error})") from None
    return state, iter(worker_files)


def read_worker(path: Path) -> Tensors:
    """A worker's own tensors, from a checkpoint that is verified already."""
    try:
        return load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise InvalidCheckpoint(f"{path}: cannot be read ({error})") from None


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        signature = manifest.pop("blake2b")
        if manifest["format"] not in (FORMAT, SHARDED):
            raise ValueError(f"unknown format {manifest['format']}")
        if _signature(manifest) != signature:
            raise ValueError("the checksum differs")
        return manifest
    except OSError as error:
        raise InvalidCheckpoint(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidCheckpoint(f"{path}: not a manifest ({error})") from None


def _is_spared(folder: Path, spare: Callable[[Any], bool]) -> bool:
    try:
        return spare(_manifest(folder)["state"])
    except InvalidCheckpoint:
        return False


def prune(
    root: Path,
    keep: int,
    spare: Callable[[Any], bool] = lambda state: False,
    *,
    number: int = 0,
) -> None:
    """Remove all checkpoints but the latest `keep` and those whose state satisfies `spare`, and
    unfinished ones up to checkpoint `number`: later ones may belong to a faster worker."""
    for folder in all_checkpoints(root)[keep:]:
        if not _is_spared(folder, spare):
            shutil.rmtree(folder, ignore_errors=True)
    remove_unfinished(root, number)


def remove_unfinished(root: Path, last: float = math.inf) -> None:
    """Remove unfinished checkpoints, up to the number `last`."""
    for folder in root.glob(".*-*.partial"):
        number = folder.name.removesuffix(".partial").rpartition("-")[2]
        if number.isdecimal() and int(number) <= last:
            shutil.rmtree(folder, ignore_errors=True)
