"""Runs survive workers that die, requests to stop, and other numbers of workers, unattended."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.workers.conftest import DAT, DOUBLE, distance, run, torchrun, weights

pytestmark = pytest.mark.slow
SETTINGS = (
    *("model.width=4", "attack.steps=2", "train.batch=48", "train.epochs=3"),
    *(
        "evaluate.report=0",
        "evaluate.attacks=pgd-1",
        "train.select_steps=1",
        "comm.threads=1",
        "train.save_every=3",
    ),
)
STEPS = 3 * 26


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three workers, never interrupted."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = run([*DAT, "train", "digits", *SETTINGS, "--workers", "3", "--out", "run"], folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@contextmanager
def started(cwd: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [*DAT, "train", *arguments]
    process = subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def children(process: subprocess.Popen[str]) -> list[int]:
    listing = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in listing.read_text().split()] if listing.exists() else []


def reached(run_folder: Path) -> int:
    """The step of the last checkpoint."""
    root = run_folder / "checkpoints"
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=0)


def wait_for(run_folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 180
    while reached(run_folder) < step:
        assert time.monotonic() < end, f"step {step} was not reached"
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.05)


def same_bits(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    best = weights(one, "best"), weights(other, "best")
    pairs = [(first, second), best]
    return all(a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) for a, b in pairs)


def figures(folder: Path) -> dict[str, object]:
    result = json.loads((folder / "result.json").read_text())
    return {key: value for key, value in result.items() if "seconds" not in key}


def losses_of(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_killed_workers_are_restarted_and_nothing_differs(
    undisturbed: Path, tmp_path: Path
) -> None:
    """SIGKILL for a random worker, twice in a run; benchmarks/faults.py does it twenty times."""
    rng = random.Random(0)
    arguments = ("digits", *SETTINGS, "--workers", "3", "--out", "run", "--restarts", "2")
    with started(tmp_path, *arguments) as process:
        for step in (6, 45):
            wait_for(tmp_path / "run", step, process)
            os.kill(rng.choice(children(process)), signal.SIGKILL)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    message = r"was killed by SIGKILL \(its log: .+\); restarting from the last checkpoint"
    assert len(re.findall(message, err)) == 2
    assert same_bits(undisturbed, tmp_path / "run")
    assert figures(undisturbed) == figures(tmp_path / "run")
    losses = losses_of(undisturbed)
    assert losses == losses_of(tmp_path / "run") and len(losses) == 3


def test_after_the_last_restart_the_error_names_the_worker(tmp_path: Path) -> None:
    arguments = ("digits", *SETTINGS, "--workers", "2", "--out", "run", "--restarts", "1")
    with started(tmp_path, *arguments) as process:
        for step in (3, 15):
            wait_for(tmp_path / "run", step, process)
            os.kill(children(process)[-1], signal.SIGKILL)
        _, err = process.communicate(timeout=120)
        left = children(process)
    assert process.returncode == 1 and left == []
    *_, reason, hint = err.splitlines()
    message = re.fullmatch(r"error: worker \d was killed by SIGKILL \(its log: (.+)\)", reason)
    assert message is not None, err
    log = (tmp_path / message[1]).read_text()
    assert log.count("of 2: process") == 2 and "epoch 1, step " in log
    assert hint.endswith("resume with: dat train --resume run") and "Traceback" not in err
    again = run([*DAT, "train", "--resume", "run", "--workers", "2", "--quiet"], tmp_path)
    assert again.returncode == 0, again.stderr


@pytest.mark.alone
def test_a_stopped_worker_is_detected_by_the_timeout(undisturbed: Path, tmp_path: Path) -> None:
    arguments = ("digits", *SETTINGS, "comm.timeout=5", "--workers", "3", "--out", "run")
    with started(tmp_path, *arguments) as process:
        wait_for(tmp_path / "run", 9, process)
        os.kill(children(process)[1], signal.SIGSTOP)
        start = time.monotonic()
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "restarting from the last checkpoint" in err
    assert time.monotonic() - start < 60
    assert same_bits(undisturbed, tmp_path / "run")


@pytest.mark.parametrize("launcher", ["dat", "torchrun"])
def test_sigterm_saves_a_checkpoint_and_has_its_own_exit_code(
    undisturbed: Path, tmp_path: Path, launcher: str
) -> None:
    """Sent to the launcher, as a scheduler does; no step before the signal is lost."""
    settings = [word for word in SETTINGS if not word.startswith("train.save_every")]
    arguments = ["train", "digits", *settings, "--out", "run", "--quiet"]
    launch = [*DAT, *arguments, "--workers", "3"]
    command = launch if launcher == "dat" else [*torchrun(3), *arguments]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(tmp_path / "run", 26, process)  # the end of the first epoch
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert "stopped on request after epoch 2, step " in err and "dat train --resume run" in err
    assert process.returncode == (75 if launcher == "dat" else 1)
    assert reached(tmp_path / "run") > 26
    again = run([*DAT, "train", "--resume", "run", "--workers", "3", "--quiet"], tmp_path)
    assert again.returncode == 0, again.stderr
    assert same_bits(undisturbed, tmp_path / "run")
    done = run([*DAT, "train", "--resume", "run"], tmp_path)
    assert done.returncode == 2 and "the run is complete" in done.stderr


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three workers, stopped in the second epoch."""
    folder = tmp_path_factory.mktemp("interrupted")
    with started(folder, "digits", *SETTINGS, "--workers", "3", "--out", "run") as process:
        wait_for(folder / "run", 30, process)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    return folder / "run"


@pytest.mark.parametrize("workers", [2, 4])
def test_resuming_with_another_number_of_workers(
    undisturbed: Path, interrupted: Path, tmp_path: Path, workers: int
) -> None:
    """The global batch and the order of the data are the same, so weights and losses differ only by
    rounding, which training amplifies."""
    shutil.copytree(interrupted, tmp_path / "run")
    done = run([*DAT, "train", "--resume", "run", "--workers", str(workers)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"resumed on {workers} workers instead of 3: the global batch of 48" in done.stderr
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(undisturbed), rel=1e-3)
    assert distance(weights(undisturbed), weights(tmp_path / "run")) < 0.05


def test_carried_perturbations_follow_their_images_to_other_workers(tmp_path: Path) -> None:
    """Stopped on three workers and resumed on two, in double precision: as if never stopped."""
    (tmp_path / "mine.py").write_text(DOUBLE)
    arguments = ("digits", *SETTINGS, "model.name=mine:Net", "attack.carry=true", "attack.steps=1")
    done = run([*DAT, "train", *arguments, "--out", "uninterrupted"], tmp_path)
    assert done.returncode == 0, done.stderr
    with started(tmp_path, *arguments, "--workers", "3", "--out", "run") as process:
        wait_for(tmp_path / "run", 30, process)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    resume = ("--resume", "run", "model.name=mine:Net")  # code has to be named again
    done = run([*DAT, "train", *resume, "--workers", "2"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "carried perturbations are redistributed with their images" in done.stderr
    assert distance(weights(tmp_path / "uninterrupted"), weights(tmp_path / "run")) < 1e-5


@pytest.mark.alone
def test_the_other_nodes_continue_without_a_lost_one(undisturbed: Path, tmp_path: Path) -> None:
    """Two nodes, each a torchrun agent with its own workers; one is killed with all of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agent = (
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--max-restarts", "5"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "lost"),
        *("--local-addr", "127.0.0.1", "--monitor-interval", "0.2"),
    )
    timeouts = "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=2"
    arguments = ("-m", "dat", "train", "digits", *SETTINGS, "comm.timeout=10", "--out", "run")
    nodes = []
    try:
        for count, host in (("2", 1), ("1", 0)):  # the first node runs the store
            conf = ("--rdzv-conf", f"{timeouts},is_host={host}", "--nproc-per-node", count)
            nodes.append(
                subprocess.Popen(
                    [*agent, *conf, *arguments],
                    cwd=tmp_path,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
            time.sleep(0.5)
        wait_for(tmp_path / "run", 9, nodes[0])
        environment = json.loads((tmp_path / "run" / "environment.json").read_text())
        assert environment["workers"] == 3
        for pid in [*children(nodes[1]), nodes[1].pid]:
            os.kill(pid, signal.SIGKILL)
        _, err = nodes[0].communicate(timeout=150)
    finally:
        for node in nodes:
            for pid in children(node):
                os.kill(pid, signal.SIGKILL)
            node.kill()
            node.communicate()
    assert nodes[0].returncode == 0, err
    assert "resumed on 2 workers instead of 3: the global batch of 48" in err
    assert distance(weights(undisturbed), weights(tmp_path / "run")) < 0.05


def listening(pids: set[int]) -> set[str]:
    """Addresses on which these processes listen, from the kernel's tables."""
    inodes = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(file)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    addresses = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                raw = bytes.fromhex(fields[1].split(":")[0])
                words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]
                addresses.add(socket.inet_ntop(family, b"".join(words)))
    return addresses


def test_a_local_run_listens_on_loopback_only(tmp_path: Path) -> None:
    with started(tmp_path, "digits", *SETTINGS, "--workers", "2", "--out", "run") as process:
        wait_for(tmp_path / "run", 6, process)
        addresses = listening({process.pid, *children(process)})
    assert addresses == {"127.0.0.1"}  # gloo's own connections; no store


def test_a_single_worker_listens_on_loopback_at_most(tmp_path: Path) -> None:
    with started(tmp_path, "digits", *SETTINGS, "--out", "run") as process:
        wait_for(tmp_path / "run", 6, process)
        addresses = listening({process.pid})
    assert addresses <= {"127.0.0.1"}


DIVERGES = """\
import os, torch
from torch import nn

class Net(nn.Module):
    '''A machine with faulty memory: worker 1's weights change by themselves.'''
    def __init__(self, classes):
        super().__init__()
        self.net = nn.Linear(64, classes)
        self.passes = 0

    def forward(self, x):
        self.passes += self.training
        if self.training and os.environ["RANK"] == "1" and self.passes == 40:
            with torch.no_grad():
                self.net.weight[0, 0] += 1e-3
        return self.net(x.flatten(1))
"""


def test_replicas_that_differ_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(DIVERGES)
    settings = [word for word in SETTINGS if not word.startswith("model.width")]
    options = ("model.name=mine:Net", "--workers", "3", "--out", "run", "--restarts", "0")
    done = run([*DAT, "train", "digits", *settings, *options], tmp_path)
    assert done.returncode == 3
    assert "the weights of worker 1 differ from those of the others" in done.stderr
    assert sys.platform == "linux"
