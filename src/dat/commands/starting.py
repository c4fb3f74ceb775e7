"""Whether a command does its work here or starts workers for it, and where results go."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from dat.launch import attempt, is_worker


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
    path, before, number = Path("runs") / name, None, 1
    while path.exists():
        before, number = path, number + 1
        path = Path("runs") / f"{name}-{number}"
    return before if before and goes_on(before) else path


def goes_on(run: Path) -> bool:
    """These workers were started before, for this run: by our launcher, which counts, or by
    torchrun, which also starts them again when nodes come and go and then only keeps its name."""
    if attempt() > 0:
        return True
    launch = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    try:
        environment = json.loads((run / "environment.json").read_text())
        return bool(launch != "none" and environment["launch"] == launch)
    except (OSError, ValueError, KeyError, TypeError):
        return False
