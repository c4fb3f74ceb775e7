"""Files that are whole: a reader sees the old one or the new one, never a part."""

from __future__ import annotations

import os
from pathlib import Path

WEIGHTS = ("best", "last", "ema-best", "ema-last")
"""The weights in a run's folder, by name."""


def log_file(run: Path, rank: int) -> Path:
    """What a worker wrote down for itself."""
    return run / "logs" / f"worker-{rank}.log"


def partial(path: Path) -> Path:
    """Where a file is written before it takes its place."""
    return path.with_name(f".{path.name}.partial")


def write_whole(path: Path, data: bytes) -> None:
    """Beside it, onto the disk, then in its place."""
    beside = partial(path)
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def sync_folder(folder: Path) -> None:
    """The names in a folder, onto the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
