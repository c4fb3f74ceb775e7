"""A NaN loss, a dead worker, Ctrl-C: all workers stop, no process is left, nothing is lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.workers.conftest import DAT, run, start, weights
from tests.workers.forked import Forked, fork

MODEL = """
import os, torch
from torch import nn

class Breaks(nn.Module):
    '''Returns NaN on worker 1 from the third epoch on.'''
    def __init__(self, classes):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
        self.trained = 0

    def forward(self, x):
        self.trained += self.training
        broken = os.environ["RANK"] == "1" and self.trained > 2 * STEPS
        return self.net(x) * (float("nan") if broken else 1.0)
"""
FACTORY = """
import os
from torch import nn

def net(classes):
    if os.environ["RANK"] == "1":
        raise RuntimeError("only here")
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""
ENDLESS = ("train.epochs=100000", "train.batch=640", "attack.name=none", "train.select_steps=1")


forked_or_launched = pytest.mark.parametrize(
    "by", [run, pytest.param(start, marks=pytest.mark.slow)], ids=["forked", "launched"]
)


@forked_or_launched
def test_a_nan_stops_all_workers_and_keeps_the_last_good_weights(tmp_path: Path, by: Any) -> None:
    (tmp_path / "mine.py").write_text(MODEL.replace("STEPS", "2"))
    words = ("model.name=mine:Breaks", "train.batch=640", "attack.name=none", "train.epochs=5")
    result = by(
        [*DAT, "train", "digits", *words, "--workers", "2", "--out", "out"], tmp_path, timeout=120
    )
    assert result.returncode == 3
    lines = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert len(lines) == 1
    assert lines[0].startswith("error: worker 1, epoch 3, step 1: the loss is nan")
    assert "Traceback" not in result.stderr
    assert (tmp_path / "out" / "metrics.jsonl").read_text().count("\n") == 2
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "out").values())
    assert not (tmp_path / "out" / "result.json").exists()


@forked_or_launched
def test_bad_input_on_one_worker_is_reported_once(tmp_path: Path, by: Any) -> None:
    """Before the first collective, so that no worker waits for the one that failed."""
    (tmp_path / "mine.py").write_text(FACTORY)
    result = by([*DAT, "train", "digits", "model.name=mine:net", "--workers", "2"], tmp_path)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: worker 1: model.name = 'mine:net': failed when called with")
    assert "RuntimeError: only here" in line


def test_more_workers_than_images(tmp_path: Path) -> None:
    images, labels = np.zeros((2, 8, 8), np.uint8), np.array([0, 1])
    arrays = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}
    np.savez(tmp_path / "two.npz", **arrays)  # type: ignore[arg-type]
    words = ("data.name=two.npz", "data.holdout=0", "train.batch=6")
    result = run([*DAT, "train", "digits", *words, "--workers", "3"], tmp_path)
    assert result.returncode == 2
    assert result.stderr == "error: 3 workers for 2 training images: use fewer workers\n"


@pytest.mark.slow
def test_ctrl_c_saves_a_checkpoint(tmp_path: Path) -> None:
    with endless_run(tmp_path, restarts=2) as launcher:
        workers = children(launcher.pid)
        assert len(workers) == 2
        os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does
        _, stderr = launcher.communicate(timeout=60)
        assert launcher.returncode == 75, stderr
        first, second, third, hint = stderr.splitlines()
        assert first == "" and second.startswith("interrupted: saving a checkpoint after this step")
        assert third.startswith("stopped on request after epoch ")
        assert hint == "resume with: dat train --resume out"
        assert gone(workers)


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_no_process_and_restarts_none(tmp_path: Path) -> None:
    with endless_run(tmp_path, restarts=2) as launcher:
        workers = children(launcher.pid)
        assert len(workers) == 2
        wait_for(lambda: any((tmp_path / "out" / "checkpoints").glob("[0-9]*")), launcher)
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)  # no checkpoint will be saved
        os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does
        time.sleep(1)
        os.killpg(launcher.pid, signal.SIGINT)
        _, stderr = launcher.communicate(timeout=60)
        assert launcher.returncode == 130
        assert "Traceback" not in stderr
        assert stderr == "error: interrupted by SIGINT\nresume with: dat train --resume out\n"
        assert gone(workers)


@pytest.mark.slow
def test_workers_exit_with_their_launcher(tmp_path: Path) -> None:
    with endless_run(tmp_path) as launcher:
        workers = children(launcher.pid)
        launcher.kill()
        launcher.wait(timeout=60)
        assert gone(workers)


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_and_is_named(tmp_path: Path) -> None:
    """With a quantized exchange, which has its own threads; the dense one is DDP's."""
    with endless_run(tmp_path, "quantizer.bits=4") as launcher:
        workers = children(launcher.pid)
        second = next(pid for pid in workers if environment(pid)["RANK"] == "1")
        os.kill(second, signal.SIGKILL)
        _, stderr = launcher.communicate(timeout=60)
        assert launcher.returncode == 1
        assert "error: worker 1 was killed by SIGKILL" in stderr
        assert "Traceback" not in stderr
        assert gone(workers)
        assert weights(tmp_path / "out")


@pytest.mark.alone
@pytest.mark.parametrize("words", [(), ("quantizer.bits=4",)])
def test_a_stopped_worker_ends_the_run_at_the_timeout(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    with endless_run(tmp_path, "comm.timeout=4", *words) as launcher:
        workers = children(launcher.pid)
        second = next(pid for pid in workers if environment(pid)["RANK"] == "1")
        os.kill(second, signal.SIGSTOP)
        _, stderr = launcher.communicate(timeout=60)
        assert launcher.returncode == 1
        line, hint = stderr.splitlines()
        assert line.startswith("error: lost worker 1: no response (")
        assert hint.endswith("resume with: dat train --resume out")
        assert "Timed out waiting 4000ms" in line or "timeout caused pair closure" in line
        assert gone(workers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "signal_number"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (0, signal.SIGSTOP)]
)
def test_without_an_agent_the_others_name_the_lost_worker(
    tmp_path: Path, lost: int, signal_number: signal.Signals
) -> None:
    """On several machines no launcher sees all workers, so the remaining ones run a liveness check.
    If worker 0 is lost, so is the store that it hosts, and they only report lost contact."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["train", "digits", *ENDLESS, "quantizer.bits=8", "comm.timeout=5", "--quiet"]
    common = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_PORT": str(port)}
    common |= {"MASTER_ADDR": "127.0.0.1"}
    workers = [
        fork(
            [*command, "--out", "out"],
            tmp_path,
            common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(3)
    ]
    remaining = [worker for rank, worker in enumerate(workers) if rank != lost]
    try:
        wait_for_an_epoch(tmp_path / "out", workers[0])
        workers[lost].send_signal(signal_number)
        messages = [worker.communicate(timeout=60)[1] for worker in remaining]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    if lost == 1:
        assert messages[0].startswith("error: lost worker 1: no response (")
        assert messages[1] == ""
    else:
        assert all(message.startswith("error: lost ") for message in messages), messages
    assert all("Traceback" not in message for message in messages)
    assert [worker.returncode for worker in remaining] == [1, 1]


@contextmanager
def endless_run(folder: Path, *words: str, restarts: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Two workers that train until they are stopped; yields after their first epoch."""
    command = [*DAT, "train", "digits", *ENDLESS, *words, "--workers", "2", "--quiet"]
    command += ["--restarts", str(restarts)]
    launcher = subprocess.Popen(
        [*command, "--out", "out"],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for_an_epoch(folder / "out", launcher)
        yield launcher
    finally:
        for pid in children(launcher.pid):
            os.kill(pid, signal.SIGKILL)
        if launcher.poll() is None:
            launcher.kill()
        launcher.communicate()


def wait_for_an_epoch(run: Path, process: subprocess.Popen[str] | Forked) -> None:
    metrics = run / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0, process)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str] | Forked) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def environment(pid: int) -> dict[str, str]:
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(variable.split("=", 1) for variable in variables if "=" in variable)


def gone(pids: list[int]) -> bool:
    """Whether all processes exit within a few seconds."""
    for _ in range(100):
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
