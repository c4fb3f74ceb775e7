"""Real processes: `dat` as a user runs it, and torchrun."""

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

from tests.workers.forked import run_command

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
"""Settings with which the digits recipe takes a few seconds and 26 steps."""

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
"""A network in double precision, where rounding flips no sign."""


def torchrun(workers: int) -> tuple[str, ...]:
    return (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(workers), "-m", "dat"),
    )


def run(
    command: Sequence[str], cwd: Path, *, timeout: float = 180
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder of its own; `dat` and its workers are forked, which is faster."""
    if tuple(command[: len(DAT)]) == DAT:
        return run_command(command[len(DAT) :], cwd, timeout=timeout)
    return start(command, cwd, timeout=timeout)


def start(
    command: Sequence[str], cwd: Path, *, timeout: float = 180
) -> subprocess.CompletedProcess[str]:
    """Run a command as from a shell, with the real launcher and without its variables set."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        list(command), cwd=cwd, env=clean, capture_output=True, text=True, timeout=timeout
    )


def train(command: Sequence[str], cwd: Path, *words: str, by: Any = run) -> Path:
    """Train into a new folder and return it."""
    out = cwd / f"run{len(list(cwd.iterdir()))}"
    result = by([*command, "train", "digits", *words, "--quiet", "--out", str(out)], cwd)
    assert result.returncode == 0, result.stderr
    return out


def weights(run: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return load_file(run / f"{name}.safetensors")


def distance(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative difference over all tensors."""
    assert actual.keys() == expected.keys()
    return max(
        float((actual[key].double() - value).norm() / value.norm().clamp(1e-12))
        for key, value in ((key, tensor.double()) for key, tensor in expected.items())
    )


@pytest.fixture(scope="session")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two workers that several tests share."""
    return train((*DAT,), tmp_path_factory.mktemp("two"), *SMALL, "--workers", "2")
