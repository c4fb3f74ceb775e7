"""Starting M workers on this machine, through the elastic launcher that torchrun is made of."""

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
"""Set for workers that `launch` started, to tell them from torchrun's: the launcher's number."""
ATTEMPT = "DAT_ATTEMPT"
"""Set for them as well: how often they were started before."""
STORE = "DAT_STORE"
"""Set for them as well: the file by which they find each other. A TCP store would listen on every
interface, and take keys from anybody."""
PREEMPTED = 75
"""Exit code of a run that was asked to stop and can be resumed."""
TOLD = "a worker was lost"
"""What the workers that are left have told in more words."""
FINAL = (2, 3, PREEMPTED)
"""Exit codes that another attempt would only repeat: bad input, divergence, a request to stop."""


def is_worker() -> bool:
    """This process is one of several that a launcher started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def attempt() -> int:
    """How often this worker was started before, by our launcher or by torchrun."""
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
    """Run `dat COMMAND` on M local workers; the exit code of the first that failed, or 0.

    When a worker dies all are started again, so many times, and find where to go on themselves;
    after that, or after Ctrl-C, the `hint` says what a person can do. A worker's `log` is named
    when it dies.
    """
    for number in range(restarts + 1):
        code, reason, rank = _launch(workers, command, number)
        if code == 0 or code in FINAL:
            return code
        if not reason:
            break
        if reason != TOLD and (file := log(rank)) and file.is_file():
            reason = f"{reason} (its log: {file})"
        left = restarts - number
        more = f"; starting again from the last checkpoint ({left - 1} left)" if left else ""
        if more or reason != TOLD:
            print(f"error: {reason}{more}", file=sys.stderr)
    if advice := hint():
        print(f"when that is mended, {advice}" if reason else advice, file=sys.stderr)
    return code


def _launch(workers: int, command: Sequence[str], number: int) -> tuple[int, str, int]:
    """One attempt: the exit code, and if a worker died how it did, and which it was."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in list(logging.root.manager.loggerDict):  # each has a level of its own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    meeting = tempfile.TemporaryDirectory(prefix="dat-")  # for this user's eyes alone
    own = {LAUNCHED: os.getpid(), ATTEMPT: number, STORE: f"{meeting.name}/store"}
    own |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}  # the agent's own, which listens as well
    os.environ |= {name: str(value) for name, value in own.items()}
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker sets its own number when it joins
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{meeting.name}/rendezvous",
        rdzv_configs={"store_type": "file"},
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(),
    )
    over = threading.Event()
    threading.Thread(target=_wake_the_stopped, args=(over,), daemon=True).start()
    try:
        elastic_launch(config, sys.executable)("-m", "dat", *command)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            return 1, f"worker {rank} was ended by {name}", rank
        return failure.exitcode, TOLD if failure.exitcode == 1 else "", rank
    except SignalException as received:
        if received.sigval == signal.SIGTERM:
            return PREEMPTED, "", 0
        print(f"error: interrupted by {received.sigval.name}", file=sys.stderr)
        return 128 + received.sigval, "", 0
    finally:
        over.set()
        for name in own:
            del os.environ[name]
        meeting.cleanup()
    return 0, "", 0


def _wake_the_stopped(over: threading.Event) -> None:
    """Once a worker has ended, so do the others; one that is stopped (SIGSTOP) would not hear the
    signal that says so, and the launcher would wait half a minute for it."""
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    most = 0
    while not over.wait(0.5) and listing.exists():
        alive = [int(pid) for pid in listing.read_text().split() if _runs(int(pid))]
        most = max(most, len(alive))
        if len(alive) < most:
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def _runs(pid: int) -> bool:
    """It is there, and not a zombie."""
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return state != "Z"
    return False


def settle_in() -> None:
    """What a launched worker does first: see to it that it ends at once, with its launcher."""
    if LAUNCHED not in os.environ:
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # not an exception in the middle of a collective
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != int(os.environ[LAUNCHED]):  # it was gone before that
        os._exit(1)
