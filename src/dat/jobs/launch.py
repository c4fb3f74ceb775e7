"""Starts M workers on this machine, with the elastic launcher that torchrun is built on."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

LAUNCHED = "DAT_LAUNCHED"
"""Environment variable of workers that `launch` started rather than torchrun: the launcher's
process id."""
ATTEMPT = "DAT_ATTEMPT"
"""Environment variable of these workers: the number of restarts so far."""
STORE = "DAT_STORE"
"""Environment variable of these workers: the file for their rendezvous. A TCP store would listen on
every interface, and accept keys from anybody."""
PREEMPTED = 75
"""Exit code of a run that stopped on request and can be resumed."""
REPORTED = "a worker was lost"
"""The reason of a failure that the remaining workers have reported in detail."""
TORCH_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""Signals on which torch's launcher ends the workers; it kills them after 30 seconds."""
FINAL = (2, 3, PREEMPTED)
"""Exit codes that a restart would only repeat: invalid input, divergence, a request to stop."""


def dat_command(*arguments: str) -> list[str]:
    """The command `dat ARGUMENTS`, run by this interpreter.

    -P: files in the current folder, which may come from somebody else, shadow no module.
    """
    return [sys.executable, "-P", "-m", "dat", *arguments]


def is_worker() -> bool:
    """Whether a launcher started this process as one of several workers."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def attempt() -> int:
    """The number of restarts of this worker so far, by our launcher or by torchrun."""
    name = ATTEMPT if LAUNCHED in os.environ else "TORCHELASTIC_RESTART_COUNT"
    return int(os.environ.get(name, 0))


def launch(
    workers: int,
    command: Sequence[str],
    *,
    restarts: int = 0,
    log: Callable[[int], Path | None] = lambda rank: None,
    hint: Callable[[], str] = str,
) -> int:
    """Run `dat COMMAND` on M local workers. Returns the exit code of the first that failed, or 0.

    When a worker dies, all are restarted, up to `restarts` times, and resume by themselves. After
    that, or after Ctrl-C, `hint` is printed. The error message names the dead worker's `log`.
    """
    for number in range(restarts + 1):
        code, reason, rank = _launch(workers, command, number)
        if code == 0 or code in FINAL:
            return code
        if not reason:
            break
        if reason != REPORTED and (file := log(rank)) and file.is_file():
            reason = f"{reason} (its log: {file})"
        left = restarts - number
        restart = f"; restarting from the last checkpoint ({left - 1} left)" if left else ""
        if restart or reason != REPORTED:
            print(f"error: {reason}{restart}", file=sys.stderr)
    if advice := hint():
        print(f"when that is fixed, {advice}" if reason else advice, file=sys.stderr)
    return code


def _launch(workers: int, command: Sequence[str], number: int) -> tuple[int, str, int]:
    """One attempt. Returns the exit code and, if a worker died, how, and its rank."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in list(logging.root.manager.loggerDict):  # each sets its own level
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    rendezvous = tempfile.TemporaryDirectory(prefix="dat-")  # accessible to this user only
    variables = {LAUNCHED: os.getpid(), ATTEMPT: number, STORE: f"{rendezvous.name}/store"}
    variables |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}  # the agent's store would listen, too
    os.environ |= {name: str(value) for name, value in variables.items()}
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker sets its own number when it joins
    before = signal.getsignal(signal.SIGINT)
    own = ["SIGINT"] if _passes_on_interrupts() else []
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{rendezvous.name}/rendezvous",
        rdzv_configs={"store_type": "file"},
        local_addr="127.0.0.1",
        max_restarts=0,
        signals_to_handle=",".join(name for name in TORCH_SIGNALS if name not in own),
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(),
    )
    done = threading.Event()
    threading.Thread(target=_wake_stopped_workers, args=(done,), daemon=True).start()
    try:
        program, *arguments = dat_command(*command)
        elastic_launch(config, program)(*arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == -signal.SIGINT:
            return _interrupted(signal.SIGINT)
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            return 1, f"worker {rank} was killed by {name}", rank
        return failure.exitcode, REPORTED if failure.exitcode == 1 else "", rank
    except SignalException as received:
        if received.sigval == signal.SIGTERM:
            return PREEMPTED, "", 0
        return _interrupted(received.sigval)
    except KeyboardInterrupt:
        return _interrupted(signal.SIGINT)
    finally:
        done.set()
        if own:
            signal.signal(signal.SIGINT, before)
        for name in variables:
            del os.environ[name]
        rendezvous.cleanup()
    return 0, "", 0


def _interrupted(number: signal.Signals) -> tuple[int, str, int]:
    """Say so. Workers that are still there end with the launcher."""
    print(f"error: interrupted by {number.name}", file=sys.stderr)
    return 128 + number, "", 0


def _passes_on_interrupts() -> bool:
    """On Ctrl-C, send SIGINT to the workers, which end, those in training with a checkpoint; on the
    second, kill them. Returns False where this is not possible, and left to torch."""
    if threading.current_thread() is not threading.main_thread() or not _children_file().exists():
        return False

    def pass_on(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, end)
        _signal_workers(signal.SIGINT)

    def end(number: int, frame: object) -> None:
        _signal_workers(signal.SIGKILL)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, pass_on)
    return True


def _signal_workers(number: signal.Signals) -> None:
    for pid in _children():
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _children_file() -> Path:
    """Lists the child processes, on Linux only."""
    return Path(f"/proc/self/task/{os.getpid()}/children")


def _children() -> list[int]:
    """The running child processes."""
    return [int(pid) for pid in _children_file().read_text().split() if _is_running(int(pid))]


def _wake_stopped_workers(done: threading.Event) -> None:
    """When a worker ends, torch terminates the others. One that is stopped (SIGSTOP) would not
    receive the signal, and the launcher would wait half a minute for it."""
    children = _children_file()
    most = 0
    while not done.wait(0.5) and children.exists():
        alive = _children()
        most = max(most, len(alive))
        if len(alive) < most:
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def _is_running(pid: int) -> bool:
    """The process exists and is not a zombie."""
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return state != "Z"
    return False


def bind_to_launcher() -> None:
    """Make a launched worker end immediately when its launcher does; called first of all."""
    if LAUNCHED not in os.environ:
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no exception in the middle of a collective
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != int(os.environ[LAUNCHED]):  # the launcher has already ended
        os._exit(1)
