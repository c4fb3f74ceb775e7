"""A run on several hosts of a test bed, and what may happen to one of them.

On every host a shell starts the node's agent (torchrun) again when it ends badly, as the service
manager of a machine would. A node that is killed loses its agent and its workers at once; one that
is cut off keeps them, and hears nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dat.bench.link import Host

SERVICE = 'n=0; until "$@"; do n=$((n + 1)); [ $n -lt 9 ] || exit 1; sleep 1; done'
PATIENCE = "keep_alive_interval=2,keep_alive_max_attempt=10,last_call_timeout=3"
"""With agents that are silent. With three seconds six agents on a busy machine never all came
together again; torch's own 15 are for hosts with cores of their own."""


class Node:
    """A host with its agent."""

    def __init__(self, host: Host, command: Sequence[str], *, cwd: Path, log: Path) -> None:
        self.host = host
        words = [*("sh", "-c", SERVICE, "node"), *_here(command)]
        clean = {name: value for name, value in os.environ.items() if not _launchers(name)}
        with log.open("a") as file:
            self.service = subprocess.Popen(
                host.command(words),
                cwd=cwd,
                env=clean | {"OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.log = log

    def kill(self) -> int:
        """SIGKILL for the agent and its workers; the service is left to start them again."""
        pids = [pid for pid in self._pids() if pid != self.service.pid]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(pids)

    def cut_off(self) -> None:
        self._link("down")

    def mend(self) -> None:
        self._link("up")

    def close(self) -> None:
        """End all of it."""
        self.service.kill()
        self.service.wait()
        self.kill()

    def _link(self, state: str) -> None:
        words = ["ip", "-n", self.host.namespace, "link", "set", self.host.interface, state]
        subprocess.run(words, check=True, capture_output=True)

    def _pids(self) -> list[int]:
        words = ["ip", "netns", "pids", self.host.namespace]
        listed = subprocess.run(words, capture_output=True, text=True, check=False)
        return [int(pid) for pid in listed.stdout.split()]


def _here(command: Sequence[str]) -> list[str]:
    """`torchrun` of this very interpreter, and patience with busy ones."""
    at = list(command).index("torchrun")
    words = [*command[:at], sys.executable, "-m", "torch.distributed.run", *command[at + 1 :]]
    conf = words.index("--rdzv-conf") + 1
    words[conf] = f"{words[conf]},{PATIENCE}"
    return [*words[: conf + 1], "--monitor-interval", "0.2", *words[conf + 1 :]]


def _launchers(name: str) -> bool:
    """A variable that a launcher around this process has set."""
    return name in ("RANK", "WORLD_SIZE") or name.startswith(("LOCAL_", "TORCHELASTIC_", "DAT_"))
