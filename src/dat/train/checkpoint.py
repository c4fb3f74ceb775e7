"""Checkpoints: everything a run needs to go on as if nothing had happened.

RUN/checkpoints/00000120/state.safetensors       tensors that all workers have alike
                         worker-1.safetensors    a worker's own: error feedback, free AT's images,
                                                 carried perturbations; of a sharded run its parts
                                                 of tensors, and in the header which rows they are
                         manifest.json           everything else, and every file's size and checksum

A checkpoint is written beside its place, onto the disk, and renamed: it is there whole, or it is
not there. It is read without executing anything, and refused if a byte differs.
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

from dat.comm import Part, part_of
from dat.files import sync_folder, write_whole
from dat.train.parted import Parted, described, find_parts

FORMAT, SHARDED = 1, 2
"""The second has parts of tensors in the workers' files."""
MANIFEST = "manifest.json"
STATE = "state.safetensors"
PATIENCE = 60.0
"""Seconds that the first worker waits for the others' files."""
Tensors = dict[str, Tensor]


class Refused(ValueError):
    """Not a whole checkpoint."""


def pack(value: Any, tensors: Tensors, name: str = "") -> Any:
    """As JSON has it: tensors are put aside under their names, other keys than text are listed."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"$tensor" if part_of(value) is None else "$parts": name}
    if isinstance(value, dict):
        inner = {key: pack(it, tensors, f"{name}/{key}") for key, it in value.items()}
        if all(isinstance(key, str) and not key.startswith("$") for key in inner):
            return inner
        return {"$items": [[key, it] for key, it in inner.items()]}
    if isinstance(value, list | tuple):
        items = [pack(it, tensors, f"{name}/{number}") for number, it in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{name}: a {type(value).__name__} cannot be kept in a checkpoint")


def unpack(value: Any, tensors: Mapping[str, Tensor | Parted]) -> Any:
    """What was packed."""
    if isinstance(value, list):
        return [unpack(it, tensors) for it in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value or "$parts" in value:
        return tensors[value["$tensor" if "$tensor" in value else "$parts"]]
    if "$items" in value:
        return {key: unpack(it, tensors) for key, it in value["$items"]}
    if "$tuple" in value:
        return tuple(unpack(it, tensors) for it in value["$tuple"])
    return {key: unpack(it, tensors) for key, it in value.items()}


def write(
    root: Path, step: int, packed: Any, tensors: Tensors, owners: int, *, kind: int = FORMAT
) -> Path:
    """The first worker's part: what all have alike, the manifest, and the name, when the files of
    those workers that have tensors of their own have come."""
    place, beside = root / f"{step:08d}", _beside(root, step)
    beside.mkdir(parents=True, exist_ok=True)
    _put(beside / STATE, save(tensors))
    _await(beside, owners)
    files = {}
    for path in sorted(beside.glob("*.safetensors")):
        files[path.name] = {"size": path.stat().st_size, "blake2b": _digest_file(path)}
    body = {"format": kind, "step": step, "files": files, "state": packed}
    _put(beside / MANIFEST, json.dumps(body | {"blake2b": _signature(body)}).encode())
    sync_folder(beside)
    if place.exists():  # a step that is taken again, after a checkpoint that could not be read
        shutil.rmtree(place)
    beside.rename(place)
    sync_folder(root)
    return place


def write_own(
    root: Path, step: int, rank: int, tensors: Tensors, parts: Mapping[str, Part] | None = None
) -> None:
    """A worker's own tensors, in the place where the first one gathers them; and which of them are
    `parts` of what."""
    beside = _beside(root, step)
    beside.mkdir(parents=True, exist_ok=True)
    write_whole(beside / f"worker-{rank}.safetensors", save(tensors, described(parts or {})))


def _beside(root: Path, step: int) -> Path:
    return root / f".{step:08d}.partial"


def _await(beside: Path, owners: int) -> None:
    start = time.monotonic()
    while len(list(beside.glob("worker-*.safetensors"))) < owners:
        if time.monotonic() - start > PATIENCE:
            raise OSError(f"the other workers' files did not come within {PATIENCE:.0f} s")
        time.sleep(0.02)


def copied(tensors: Tensors) -> Tensors:
    """As they are now, on the CPU: training goes on while they are written."""
    return {
        name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()
    }


def _put(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _digest_file(path: Path) -> str:
    """The same, without all of the file in memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()


def _signature(body: dict[str, Any]) -> str:
    return _digest(json.dumps(body, sort_keys=True).encode())


def all_checkpoints(root: Path) -> list[Path]:
    """From the last to the first, whole or not."""
    found = [it for it in root.glob("*") if it.name.isdecimal()] if root.is_dir() else []
    return sorted(found, key=lambda it: int(it.name), reverse=True)


def has_checkpoint(run: Path) -> bool:
    """Whether a run can be resumed."""
    return bool(all_checkpoints(run / "checkpoints"))


def read(place: Path) -> tuple[Any, Iterator[Path]]:
    """What all workers have alike, and the workers' own files; verified to the last byte."""
    manifest = _manifest(place)
    for name, told in manifest["files"].items():
        path = place / name
        if Path(name).name != name or not path.is_file():
            raise Refused(f"{path}: missing")
        if path.stat().st_size != told["size"] or _digest_file(path) != told["blake2b"]:
            raise Refused(f"{path}: is not what was written (the checksum differs)")
    own = [place / name for name in sorted(manifest["files"]) if name != STATE]
    try:
        if STATE not in manifest["files"]:
            raise KeyError(STATE)
        tensors = load((place / STATE).read_bytes())
        parts = find_parts(own) if manifest["format"] == SHARDED else {}
        state = unpack(manifest["state"], {**tensors, **parts})
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise Refused(f"{place}: not a checkpoint ({error})") from None
    return state, iter(own)


def read_own(path: Path) -> Tensors:
    """A worker's own tensors, of a checkpoint that was verified."""
    try:
        return load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise Refused(f"{path}: cannot be read ({error})") from None


def _manifest(place: Path) -> dict[str, Any]:
    path = place / MANIFEST
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        signature = found.pop("blake2b")
        if found["format"] not in (FORMAT, SHARDED):
            raise ValueError(f"format {found['format']}")
        if _signature(found) != signature:
            raise ValueError("the checksum differs")
        return found
    except OSError as error:
        raise Refused(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"{path}: not a manifest ({error})") from None


def _spared(place: Path, spare: Callable[[Any], bool]) -> bool:
    try:
        return spare(_manifest(place)["state"])
    except Refused:
        return False


def tidy(root: Path, keep: int, spare: Callable[[Any], bool] = lambda state: False) -> None:
    """Remove all but the last few and those whose state is to be spared, and what was never
    finished before the last. What comes after it, a faster worker has begun."""
    found = all_checkpoints(root)
    for old in found[keep:]:
        if not _spared(old, spare):
            shutil.rmtree(old, ignore_errors=True)
    if found:
        clear(root, int(found[0].name))


def clear(root: Path, last: float = math.inf) -> None:
    """Remove what was never finished, up to a step."""
    for half in root.glob(".*.partial"):
        step = half.name.split(".")[1]
        if step.isdecimal() and int(step) <= last:
            shutil.rmtree(half, ignore_errors=True)
