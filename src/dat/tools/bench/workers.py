"""Start one worker per host, as torchrun would."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Sequence

from dat.jobs.launch import LAUNCHED
from dat.tools.bench.link import Host

LOCAL = Host("", "127.0.0.1", "lo")
"""This machine, outside of all namespaces."""


def run_workers(hosts: Sequence[Host], words: Sequence[str]) -> None:
    """Run the same command on every host and wait; if one worker fails, kill all. A host that is
    listed n times gets n workers."""
    port, running = _free_port(), []
    try:
        for rank, host in enumerate(hosts):
            neighbors = [other for other, place in enumerate(hosts) if place == host]
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(hosts)),
                "LOCAL_RANK": str(neighbors.index(rank)),
                "LOCAL_WORLD_SIZE": str(len(neighbors)),
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": host.interface,
                "OMP_NUM_THREADS": "1",
                LAUNCHED: str(os.getpid()),
            }
            running.append(subprocess.Popen(host.command(words), env=environment))
        while any(process.poll() is None for process in running):
            if any(process.returncode for process in running):
                break
            time.sleep(0.05)
        for rank, process in enumerate(running):
            if process.returncode:
                raise OSError(f"benchmark worker {rank} exited with code {process.returncode}")
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
