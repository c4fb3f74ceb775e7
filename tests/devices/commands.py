"""The commands on the simulated device, which `comm.device=auto` finds."""

from __future__ import annotations

import contextlib
import io
import os
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from dat.cli import main
from dat.jobs import launch
from tests.devices.device_code import RECORDER
from tests.workers.conftest import SMALL

COMMANDS = {
    "train": ("train", "digits", *SMALL, "--out", "run"),
    "evaluate": ("evaluate", "run", "--attacks", "pgd-2"),
    "certify": ("certify", "run", "--sigma", "0.25", "--images", "10", "--n", "64"),
    "doctor": ("doctor",),
}
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def run(folder: Path) -> Iterator[tuple[str, str]]:
    os.chdir(folder)
    for name in (*LAUNCHED, launch.LAUNCHED, launch.ATTEMPT, launch.STORE):
        os.environ.pop(name, None)  # each command starts workers itself
    for name, words in COMMANDS.items():
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                with RECORDER.recording():
                    main(list(words))
            yield name, ""
        except SystemExit as end:
            yield name, output.getvalue() if end.code else ""
        except Exception:
            yield name, output.getvalue() + traceback.format_exc()
        if dist.is_initialized():
            dist.destroy_process_group()
