"""The files of a run's folder, and atomic writes: a reader sees the old file or the new one."""

from __future__ import annotations

import os
from pathlib import Path

WEIGHTS = ("best", "last", "ema-best", "ema-last")
"""The weights in a run's folder, by name."""
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
RESULT = "result.json"
WARNINGS = "warnings.txt"
ERROR_ANALYSIS = "examination.json"
GALLERY = "gallery"
MEASURED = "measured.jsonl"
PAGE = "report.html"
"""The other files; `train/folder.py` describes them."""


def check_output_folder(run: Path, *, overwrite: bool = False) -> None:
    """Raise if the folder is not writable or not empty, unless it holds a run to overwrite."""
    existing = next(folder for folder in (run, *run.absolute().parents) if folder.exists())
    if not os.access(existing, os.W_OK):
        raise ValueError(f"{run}: no permission to write to {existing}; choose another --out")
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        is_run = (run / CONFIG).is_file()
        if not (overwrite and is_run):
            hint = "replace that run with --overwrite" if is_run else "remove it yourself"
            raise ValueError(f"{run}: already exists; choose another --out, or {hint}")


def log_file(run: Path, rank: int) -> Path:
    """A worker's own log."""
    return run / "logs" / f"worker-{rank}.log"


def partial(path: Path) -> Path:
    """The temporary path a file is written to before it replaces `path`."""
    return path.with_name(f".{path.name}.partial")


def atomic_write(path: Path, data: bytes) -> None:
    """Write to a temporary file, flush it to disk, and rename it to `path`."""
    temporary = partial(path)
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def sync_folder(folder: Path) -> None:
    """Flush a folder's directory entries to disk, so that renames in it survive a crash."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
