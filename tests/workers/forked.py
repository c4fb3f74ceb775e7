"""Commands and workers that start without importing torch: forked from a process that has done so.

A new interpreter needs seconds to import torch and the training code, a fork milliseconds; over
hundreds of commands with M workers each, imports took most of the tests' time. Tests of the
launcher, of signals and of dying processes start real ones.

The fork server is our own, because that of `multiprocessing` does not support several threads:
`Process.start()` in one thread polls the processes of all others, two threads read one status, and
the second takes the end of the file for exit code 255. Here each process has its own connection.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

from dat.cli import main
from dat.jobs import launch

LOADED = (
    *(
        "dat.jobs.train",
        "dat.jobs.evaluate",
        "dat.jobs.verify",
        "dat.jobs.sweep",
        "dat.jobs.certify",
        "dat.jobs.report",
        "dat.jobs.selftrain",
        "dat.evaluation.certification",
        "dat.tools.bench",
        "dat.tools.selftest.job",
    ),
    *("dat.config.recipes", "sklearn.datasets", "rich._emoji_codes"),
    *("torch._dynamo", "torch.utils.tensorboard", "torch.nn.parallel.distributed", "pytest"),
)
"""Modules to import before forking. None may start a thread: a fork would not have it."""
CLEAN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
ROOT = Path(__file__).parents[2]
_starting = threading.Lock()


@cache
def _server() -> tuple[str, subprocess.Popen[bytes]]:
    """The server's address and process. It exits with all its forks when this process closes its
    standard input. The variables that torch reads only on import are set as by the launcher."""
    address = str(Path(tempfile.mkdtemp(prefix="forks-"), "socket"))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-c", f"from {__name__} import serve; serve({address!r})"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n", "the fork server did not start"
    atexit.register(_end, process)
    return address, process


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.wait()
    process.stdout.close()


def serve(address: str) -> None:
    """Fork for every connection, until standard input is closed."""
    for name in LOADED:
        importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    print("ready", flush=True)
    while sys.stdin not in (readable := select.select([listener, sys.stdin], [], [])[0]):
        assert readable
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            _supervise(connection)
        connection.close()
    shutil.rmtree(Path(address).parent)
    os._exit(0)


def _supervise(connection: socket.socket) -> NoReturn:
    """Start the requested process, send its pid, wait for it, and send its exit code. Kill it if
    the requester disconnects."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _redirect(Path(os.devnull), Path(os.devnull))  # the server's own are pipes
    with connection.makefile("rb") as request:
        details = pickle.load(request)
    pid = os.fork()
    if not pid:
        connection.close()
        _run_process(*details)
    connection.sendall(f"{pid}\n".encode())
    if connection.fileno() in select.select([os.pidfd_open(pid), connection.fileno()], [], [])[0]:
        os.kill(pid, signal.SIGKILL)  # it may not lead a group yet
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


class Forked:
    """A forked process that runs a function in a folder; has the interface of `Popen`."""

    def __init__(
        self, work: Callable[[], object], cwd: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        clean = {name: value for name, value in os.environ.items() if name not in CLEAN}
        self.args = str(work)
        self.returncode: int | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="forked-")
        self._files = Path(self._folder.name, "out"), Path(self._folder.name, "err")
        with _starting:
            address, _ = _server()
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address)
        self._answers = b""
        details = (work, self._files, cwd, clean | dict(variables or {}))
        self._connection.sendall(pickle.dumps(details))
        self.pid = int(self._answer(None))
        self._outputs = "", ""

    def _answer(self, timeout: float | None) -> str:
        """The next line from the server; raises `TimeoutError` if there is none in time."""
        end = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._answers:
            remaining = None if end is None else max(end - time.monotonic(), 0)
            if not select.select([self._connection], [], [], remaining)[0]:
                raise TimeoutError
            data = self._connection.recv(64)
            if not data:
                raise RuntimeError(f"{self.args} was not started: see standard error")
            self._answers += data
        line, _, self._answers = self._answers.partition(b"\n")
        return line.decode()

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            try:
                self.returncode = int(self._answer(timeout))
            except TimeoutError:
                raise subprocess.TimeoutExpired(
                    self.args, timeout or 0, *self._read_outputs()
                ) from None
            self._connection.close()
            self._outputs = self._read_outputs()
            self._folder.cleanup()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self._outputs

    def _read_outputs(self) -> tuple[str, str]:
        out, err = (file.read_text() if file.exists() else "" for file in self._files)
        return out, err


def fork(words: Sequence[str], cwd: Path, variables: Mapping[str, str] | None = None) -> Forked:
    """Start `dat WORDS` in a folder; its workers are forked as well."""
    return Forked(partial(_command, list(words)), cwd, variables)


def run_command(
    words: Sequence[str], cwd: Path, *, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run `dat WORDS` in a folder to its end."""
    return _finish(fork(words, cwd), timeout)


def run_workers(
    workers: int,
    work: Callable[..., object],
    *details: Any,
    cwd: Path | None = None,
    timeout: float = 180,
) -> None:
    """Run a function of a test module in M workers, as torchrun would start them."""
    process = Forked(partial(_workers, workers, work, details), cwd or Path.cwd())
    result = _finish(process, timeout)
    assert result.returncode == 0, result.stderr


def _finish(process: Forked, timeout: float) -> subprocess.CompletedProcess[str]:
    try:
        outputs = process.communicate(timeout)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, *outputs)


def _run_process(
    work: Callable[[], object], files: Sequence[Path], cwd: Path, environment: Mapping[str, str]
) -> NoReturn:
    """Run `work` as a new interpreter would: with its folder, environment, output, and exit."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ |= environment
    sys.path.insert(0, str(cwd))
    importlib.invalidate_caches()
    _redirect(Path(os.devnull), *files)
    code = _exit_code(work)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _redirect(*paths: Path) -> None:
    """Redirect standard input, output and error to these paths, in this order."""
    for descriptor, path in enumerate(paths):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)


def _exit_code(work: Callable[[], object]) -> int:
    """The exit code of a process that does this work."""
    try:
        work()
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _command(words: Sequence[str]) -> NoReturn:
    sys.argv = ["dat", *words]
    launch._launch = _launch
    main(words)


def _launch(workers: int, command: Sequence[str], number: int) -> tuple[int, str, int]:
    """Replaces `dat.jobs.launch._launch`, the elastic launcher."""
    return fork_workers(workers, partial(_command, command), number)


def _workers(workers: int, work: Callable[..., object], details: Sequence[Any]) -> NoReturn:
    code, reason, rank = fork_workers(workers, partial(work, *details))
    if code:
        print(f"worker {rank} failed first: {reason or f'exit code {code}'}", file=sys.stderr)
    sys.exit(code)


def fork_workers(workers: int, work: Callable[[], object], number: int = 0) -> tuple[int, str, int]:
    """Run M workers; when one fails, stop the others, as `dat.jobs.launch._launch` does."""
    with tempfile.TemporaryDirectory(prefix="dat-") as store:
        common = {launch.LAUNCHED: os.getpid(), launch.ATTEMPT: number}
        common |= {"WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
        sys.stdout.flush()
        ranks = {}
        for rank in range(workers):
            own = common | {"RANK": rank, "LOCAL_RANK": rank, launch.STORE: f"{store}/store"}
            pid = os.fork()
            if not pid:
                os.environ |= {name: str(value) for name, value in own.items()}
                _run_worker(work)
            ranks[pid] = rank
        first = 0, "", 0
        while ranks:
            pid, status = os.wait()
            rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
            if code and not first[0]:
                reason = launch.REPORTED if code == 1 else ""
                if code < 0:
                    reason = f"worker {rank} was killed by {signal.Signals(-code).name}"
                first = max(code, 1), reason, rank
                time.sleep(0.1)  # the launcher's polling interval
                for other in ranks:
                    os.kill(other, signal.SIGTERM)
        return first


def _run_worker(work: Callable[[], object]) -> NoReturn:
    def set_up_and_work() -> None:
        faulthandler.enable()  # a stack for SIGSEGV and SIGABRT
        launch.bind_to_launcher()
        work()

    code = _exit_code(set_up_and_work)
    sys.stdout.flush()
    os._exit(code)
