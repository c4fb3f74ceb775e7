"""Commands and workers without the wait for torch: forked from a process that has loaded it.

A new interpreter spends seconds on importing torch and what training adds to it, a fork of one that
has done so milliseconds; over hundreds of commands of M workers that was most of the tests' time.
What is about the launcher, about signals or the death of a process is started for real.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dat import launch
from dat.cli import main

LOADED = (
    *("dat.training", "dat.measure", "dat.selftrain", "dat.certification", "dat.bench"),
    *("dat.commands.measuring", "dat.recipes", "sklearn.datasets", "rich._emoji_codes"),
    *("torch._dynamo", "torch.utils.tensorboard", "torch.nn.parallel.distributed", "pytest"),
)
"""With what they import; nothing that starts a thread, or a fork would be left without it."""
CLEAN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")


@cache
def server() -> ForkServerContext:
    """Started once, with what is only looked at when torch is loaded: what the launcher sets for
    its workers, and the command line for itself."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(LOADED))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
        forkserver.ensure_running()
    return context


class Forked:
    """A process that does some work in a folder; to be used as subprocess.Popen is."""

    def __init__(
        self, work: Callable[[], object], cwd: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        clean = {name: value for name, value in os.environ.items() if name not in CLEAN}
        self.args = str(work)
        self._folder = tempfile.TemporaryDirectory(prefix="forked-")
        self._files = Path(self._folder.name, "out"), Path(self._folder.name, "err")
        details = (work, self._files, cwd, clean | dict(variables or {}))
        self._process = server().Process(target=_settle, args=details)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

        self._said: tuple[str, str] | None = None

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self._process.join(timeout)
        if self._said is None:
            out, err = (file.read_text() if file.exists() else "" for file in self._files)
            if self.poll() is None:
                raise subprocess.TimeoutExpired(self.args, timeout or 0, out, err)
            self._said = out, err
            self._folder.cleanup()
        return self._said


def fork(words: Sequence[str], cwd: Path, variables: Mapping[str, str] | None = None) -> Forked:
    """`dat WORDS` in that folder, its workers forked as well."""
    return Forked(partial(_command, list(words)), cwd, variables)


def run_command(
    words: Sequence[str], cwd: Path, *, timeout: float
) -> subprocess.CompletedProcess[str]:
    """The same, to its end."""
    return _finish(fork(words, cwd), timeout)


def run_workers(
    workers: int, work: Callable[..., object], *details: Any, cwd: Path | None = None
) -> None:
    """A function of a module of ours in M workers, as torchrun would start them."""
    process = Forked(partial(_workers, workers, work, details), cwd or Path.cwd())
    done = _finish(process, 180)
    assert done.returncode == 0, done.stderr


def _finish(process: Forked, timeout: float) -> subprocess.CompletedProcess[str]:
    try:
        said = process.communicate(timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, *said)


def _settle(
    work: Callable[[], object], files: Sequence[Path], cwd: Path, environment: Mapping[str, str]
) -> None:
    """What a new interpreter would find: its folder, its variables, its output, and its end."""
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ |= environment
    sys.path.insert(0, str(cwd))
    importlib.invalidate_caches()
    for number, file in enumerate(files, 1):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    try:
        work()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()


def _command(words: Sequence[str]) -> NoReturn:
    sys.argv = ["dat", *words]
    launch._launch = _launch
    main(words)


def _launch(workers: int, command: Sequence[str], number: int) -> tuple[int, str, int]:
    """In the place of the elastic launcher's."""
    return fork_workers(workers, partial(_command, command), number)


def _workers(workers: int, work: Callable[..., object], details: Sequence[Any]) -> NoReturn:
    sys.exit(fork_workers(workers, partial(work, *details))[0])


def fork_workers(workers: int, work: Callable[[], object], number: int = 0) -> tuple[int, str, int]:
    """M workers at once; when one fails the others are asked to stop. As `dat.launch._launch`."""
    with tempfile.TemporaryDirectory(prefix="dat-") as meeting:
        common = {launch.LAUNCHED: os.getpid(), launch.ATTEMPT: number}
        common |= {"WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
        sys.stdout.flush()
        ranks = {}
        for rank in range(workers):
            own = common | {"RANK": rank, "LOCAL_RANK": rank, launch.STORE: f"{meeting}/store"}
            pid = os.fork()
            if not pid:
                os.environ |= {name: str(value) for name, value in own.items()}
                _be_a_worker(work)
            ranks[pid] = rank
        first = 0, "", 0
        while ranks:
            pid, status = os.wait()
            rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
            if code and not first[0]:
                reason = launch.TOLD if code == 1 else ""
                if code < 0:
                    reason = f"worker {rank} was ended by {signal.Signals(-code).name}"
                first = max(code, 1), reason, rank
                time.sleep(0.1)  # so often the launcher looks
                for other in ranks:
                    os.kill(other, signal.SIGTERM)
        return first


def _be_a_worker(work: Callable[[], object]) -> NoReturn:
    code = 1
    try:
        launch.settle_in()
        work()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
