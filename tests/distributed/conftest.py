"""Real processes: `dat` as a user starts it, and torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.forked import run_command

DAT = (sys.executable, "-m", "dat")
SMALL = (
    "model.width=4",
    "attack.steps=3",
    "train.batch=48",
    "train.epochs=1",
    "evaluate.report=0",
    "evaluate.attacks=pgd-2",
    "train.select_steps=2",
    "comm.threads=1",
)
"""Settings that make the digits recipe take a few seconds and 26 steps."""

DOUBLE = """
from torch import nn
from dat.models import build_model

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.net = build_model("cnn", classes, channels=1, width=4).double()

    def forward(self, x):
        return self.net(x.double())
"""
"""A network whose rounding flips no sign."""


def torchrun(workers: int) -> tuple[str, ...]:
    return (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(workers), "-m", "dat"),
    )


def run(
    command: Sequence[str], cwd: Path, *, timeout: float = 180
) -> subprocess.CompletedProcess[str]:
    """A command in a folder of its own; `dat` and its workers are forked, which is quicker."""
    if tuple(command[: len(DAT)]) == DAT:
        return run_command(command[len(DAT) :], cwd, timeout=timeout)
    return start(command, cwd, timeout=timeout)


def start(
    command: Sequence[str], cwd: Path, *, timeout: float = 180
) -> subprocess.CompletedProcess[str]:
    """The same as if from a shell, with the real launcher: no launcher's variables about it."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        list(command), cwd=cwd, env=clean, capture_output=True, text=True, timeout=timeout
    )


def train(command: Sequence[str], cwd: Path, *words: str, by: Any = run) -> Path:
    """Train into a new folder and return it."""
    out = cwd / f"run{len(list(cwd.iterdir()))}"
    done = by([*command, "train", "digits", *words, "--quiet", "--out", str(out)], cwd)
    assert done.returncode == 0, done.stderr
    return out


def weights(run: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return load_file(run / f"{name}.safetensors")


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of any tensor."""
    assert one.keys() == other.keys()
    return max(
        float((one[k].double() - other[k].double()).norm() / other[k].double().norm().clamp(1e-12))
        for k in one
    )


@pytest.fixture(scope="session")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two workers that several tests look at."""
    return train((*DAT,), tmp_path_factory.mktemp("two"), *SMALL, "--workers", "2")
