"""Starting M workers on this machine, through the elastic launcher that torchrun is made of."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

LAUNCHED = "DAT_LAUNCHED"
"""Set for workers that `launch` started, to tell them from torchrun's: the launcher's number."""


def is_worker() -> bool:
    """This process is one of several that a launcher started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(workers: int, command: Sequence[str]) -> int:
    """Run `dat COMMAND` on M local workers; the exit code of the first that failed, or 0."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in list(logging.root.manager.loggerDict):  # each has a level of its own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ[LAUNCHED] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker sets its own number when it joins
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
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
            print(f"error: worker {rank} was ended by {name}", file=sys.stderr)
            return 1
        return failure.exitcode
    except SignalException as received:
        print(f"error: interrupted by {received.sigval.name}", file=sys.stderr)
        return 128 + received.sigval
    finally:
        over.set()
        del os.environ[LAUNCHED]
    return 0


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
