"""Whether a command starts workers or is one, and the run folder that its workers share."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from dat.jobs.launch import attempt, is_worker


def starts_workers(arguments: argparse.Namespace) -> bool:
    """Whether this process only starts workers; under a launcher it is itself a worker."""
    if is_worker():
        world = int(os.environ["WORLD_SIZE"])
        if arguments.workers not in (None, world):
            raise ValueError(
                f"--workers {arguments.workers}: the launcher started {world} workers; "
                "omit --workers"
            )
        return False
    return arguments.workers is not None and arguments.workers > 1


def free_folder(name: str) -> Path:
    """runs/NAME, or the first of runs/NAME-2, runs/NAME-3, ... that does not exist yet."""
    path, previous, number = Path("runs") / name, None, 1
    while path.exists():
        previous, number = path, number + 1
        path = Path("runs") / f"{name}-{number}"
    return previous if previous and is_restart(previous) else path


def is_restart(run: Path) -> bool:
    """Whether these workers were started before, for this run.

    Our launcher counts its attempts. torchrun also restarts workers when nodes come and go, and
    then only keeps its run ID.
    """
    if attempt() > 0:
        return True
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    try:
        environment = json.loads((run / "environment.json").read_text())
        return bool(run_id != "none" and environment["launch"] == run_id)
    except (OSError, ValueError, KeyError, TypeError):
        return False
