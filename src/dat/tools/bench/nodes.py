"""A run on several simulated hosts, and failures of one of them.

On every host a shell restarts the node's agent (torchrun) when it fails, as a service manager
would. A node that is killed loses its agent and its workers at once; one that is disconnected keeps
them, but receives nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dat.tools.bench.link import Host

SERVICE = 'n=0; until "$@"; do n=$((n + 1)); [ $n -lt 9 ] || exit 1; sleep 1; done'
RENDEZVOUS = "keep_alive_interval=2,keep_alive_max_attempt=10,last_call_timeout=3"
"""How long the rendezvous waits for silent agents. torch's default of 15 seconds is for hosts with
their own cores; with 3 seconds, six agents on a busy machine never completed a rendezvous."""


class Node:
    """A host with its agent."""

    def __init__(self, host: Host, command: Sequence[str], *, cwd: Path, log: Path) -> None:
        self.host = host
        words = [*("sh", "-c", SERVICE, "node"), *_torchrun(command)]
        clean = {name: value for name, value in os.environ.items() if not _from_launcher(name)}
        with log.open("a") as file:
            self.service = subprocess.Popen(
                host.command(words),
                cwd=cwd,
                # modules in the current folder must not shadow those of the workers
                env=clean | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.log = log

    def kill(self) -> int:
        """Kill the agent and its workers (SIGKILL); the service restarts them. Return how many."""
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
        """End the service, the agent and the workers."""
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


def _torchrun(command: Sequence[str]) -> list[str]:
    """The command with this interpreter's torchrun and a longer rendezvous."""
    start = list(command).index("torchrun")
    module = [sys.executable, "-m", "torch.distributed.run"]
    words = [*command[:start], *module, *command[start + 1 :]]
    conf = words.index("--rdzv-conf") + 1
    words[conf] = f"{words[conf]},{RENDEZVOUS}"
    return [*words[: conf + 1], "--monitor-interval", "0.2", *words[conf + 1 :]]


def _from_launcher(name: str) -> bool:
    """Whether an environment variable was set by a launcher of this process."""
    return name in ("RANK", "WORLD_SIZE") or name.startswith(("LOCAL_", "TORCHELASTIC_", "DAT_"))
