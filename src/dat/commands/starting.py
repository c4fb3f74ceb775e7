"""Whether a command does its work here or starts workers for it, and where results go."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from dat.launch import is_worker


def starts_workers(arguments: argparse.Namespace) -> bool:
    """This process only starts others; under a launcher it is itself a worker."""
    if is_worker():
        world = int(os.environ["WORLD_SIZE"])
        if arguments.workers not in (None, world):
            raise ValueError(
                f"--workers {arguments.workers}: the launcher started {world}; leave --workers out"
            )
        return False
    return arguments.workers is not None and arguments.workers > 1


def free_folder(name: str) -> Path:
    """runs/NAME, or the first of runs/NAME-2, runs/NAME-3, ... that is not there yet."""
    path, number = Path("runs") / name, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return path
