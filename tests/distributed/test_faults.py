"""A broken loss, a dead worker, Ctrl-C: everybody stops, nobody is left behind, nothing is lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.conftest import DAT, run, start, weights
from tests.distributed.forked import Forked, fork

MODEL = """
import os, torch
from torch import nn

class Breaks(nn.Module):
    '''Gives NaN at worker 1 from its third epoch on.'''
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


def test_a_nan_stops_all_workers_and_keeps_the_last_good_weights(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL.replace("STEPS", "2"))
    words = ("model.name=mine:Breaks", "train.batch=640", "attack.name=none", "train.epochs=5")
    done = start(
        [*DAT, "train", "digits", *words, "--workers", "2", "--out", "out"], tmp_path, timeout=120
    )
    assert done.returncode == 3
    lines = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert len(lines) == 1
    assert lines[0].startswith("error: worker 1, epoch 3, step 1: the loss is nan")
    assert "Traceback" not in done.stderr
    assert (tmp_path / "out" / "metrics.jsonl").read_text().count("\n") == 2
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "out").values())
    assert not (tmp_path / "out" / "result.json").exists()


def test_bad_input_at_one_worker_is_told_once(tmp_path: Path) -> None:
    """Before anything is exchanged, so that nobody waits for the one that failed."""
    (tmp_path / "mine.py").write_text(FACTORY)
    done = start([*DAT, "train", "digits", "model.name=mine:net", "--workers", "2"], tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: worker 1: model.name = 'mine:net': failed when called with")
    assert "RuntimeError: only here" in line


def test_more_workers_than_images(tmp_path: Path) -> None:
    images, labels = np.zeros((2, 8, 8), np.uint8), np.array([0, 1])
    arrays = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}
    np.savez(tmp_path / "two.npz", **arrays)  # type: ignore[arg-type]
    words = ("data.name=two.npz", "data.holdout=0", "train.batch=2")
    done = run([*DAT, "train", "digits", *words, "--workers", "3"], tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: 3 workers for 2 training images: use fewer workers\n"


def test_ctrl_c_leaves_no_process_and_starts_none(tmp_path: Path) -> None:
    with endless_run(tmp_path, restarts=2) as launcher:
        workers = children(launcher.pid)
        assert len(workers) == 2
        wait_for(lambda: any((tmp_path / "out" / "checkpoints").glob("[0-9]*")), launcher)
        os.killpg(launcher.pid, signal.SIGINT)  # what a terminal does
        _, said = launcher.communicate(timeout=60)
        assert launcher.returncode == 130
        assert "Traceback" not in said
        assert said == "error: interrupted by SIGINT\ngo on with: dat train --resume out\n"
        assert gone(workers)


def test_a_dead_launcher_takes_its_workers_along(tmp_path: Path) -> None:
    with endless_run(tmp_path) as launcher:
        workers = children(launcher.pid)
        launcher.kill()
        launcher.wait(timeout=60)
        assert gone(workers)


def test_a_killed_worker_ends_the_run_and_is_named(tmp_path: Path) -> None:
    """In an exchange with threads of its own; the dense one is DDP's."""
    with endless_run(tmp_path, "quantizer.bits=4") as launcher:
        workers = children(launcher.pid)
        victim = next(pid for pid in workers if environment(pid)["RANK"] == "1")
        os.kill(victim, signal.SIGKILL)
        _, said = launcher.communicate(timeout=60)
        assert launcher.returncode == 1
        assert "error: worker 1 was ended by SIGKILL" in said
        assert "Traceback" not in said
        assert gone(workers)
        assert weights(tmp_path / "out")


@pytest.mark.alone
@pytest.mark.parametrize("words", [(), ("quantizer.bits=4",)])
def test_a_stopped_worker_ends_the_run_at_the_timeout(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    with endless_run(tmp_path, "comm.timeout=4", *words) as launcher:
        workers = children(launcher.pid)
        victim = next(pid for pid in workers if environment(pid)["RANK"] == "1")
        os.kill(victim, signal.SIGSTOP)
        _, said = launcher.communicate(timeout=60)
        assert launcher.returncode == 1
        line, hint = said.splitlines()
        assert line.startswith("error: lost worker 1: no answer (")
        assert hint.endswith("go on with: dat train --resume out")
        assert "Timed out waiting 4000ms" in line or "timeout caused pair closure" in line
        assert gone(workers)


@pytest.mark.parametrize(
    ("victim", "number"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (0, signal.SIGSTOP)]
)
def test_without_an_agent_the_others_name_the_one_that_is_gone(
    tmp_path: Path, victim: int, number: signal.Signals
) -> None:
    """On several machines no launcher sees all workers; those that are left call the roll. With
    worker 0 goes the store that it kept, or it does not answer, and they say that much."""
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
    left = [worker for rank, worker in enumerate(workers) if rank != victim]
    try:
        wait_for_an_epoch(tmp_path / "out", workers[0])
        workers[victim].send_signal(number)
        said = [worker.communicate(timeout=60)[1] for worker in left]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    if victim == 1:
        assert said[0].startswith("error: lost worker 1: no answer (")
        assert said[1] == ""
    else:
        assert all(text.startswith("error: lost ") for text in said), said
    assert all("Traceback" not in text for text in said)
    assert [worker.returncode for worker in left] == [1, 1]


@contextmanager
def endless_run(folder: Path, *words: str, restarts: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Two workers that train until they are stopped, seen to have finished an epoch."""
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


def wait_for(seen: Callable[[], bool], process: subprocess.Popen[str] | Forked) -> None:
    patience = time.monotonic() + 120
    while not seen():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < patience
        time.sleep(0.1)


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def environment(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def gone(pids: list[int]) -> bool:
    """All have ended, within a few seconds."""
    for _ in range(100):
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
