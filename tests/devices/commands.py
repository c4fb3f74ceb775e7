"""The commands on the simulated device, which `comm.device=auto` finds."""

from __future__ import annotations

import contextlib
import io
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dat.cli import main
from dat.jobs import launch
from tests.devices.device_code import RECORDER
from tests.workers.conftest import SMALL

COMMANDS = {
    "train": ("train", "digits", *SMALL, "--out", "run"),
    "evaluate": ("evaluate", "run", "--attacks", "pgd-2", "--bundle", "evidence"),
    "verify": ("verify", "evidence", "--model", "run"),
    "certify": ("certify", "run", "--sigma", "0.25", "--images", "10", "--n", "64"),
    "doctor": ("doctor",),
    "label": ("label", "run", "--unlabelled", "digits"),
    "report": ("report", "run", "--out", "report.html", "--images", "20"),
    "profile": ("profile", "digits", *SMALL, "--steps", "2"),
    "plan": ("plan", "digits", *SMALL),
    "bench comm": ("bench", "comm", "--values", "4096"),
}
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def run(folder: Path) -> Iterator[tuple[str, str]]:
    os.chdir(folder)
    for name in (*LAUNCHED, launch.LAUNCHED, launch.ATTEMPT, launch.STORE):
        os.environ.pop(name, None)  # each command starts workers itself
    for name, words in COMMANDS.items():
        output, code = io.StringIO(), None
        redirected = contextlib.redirect_stdout(output), contextlib.redirect_stderr(output)
        with redirected[0], redirected[1], RECORDER.recording():
            code = exit_code(words)
        yield name, output.getvalue() if code else ""
        if dist.is_initialized():
            dist.destroy_process_group()


def exit_code(words: tuple[str, ...]) -> Any:
    try:
        main(list(words))
    except SystemExit as end:
        return end.code
    except Exception:
        traceback.print_exc()
    return 1
