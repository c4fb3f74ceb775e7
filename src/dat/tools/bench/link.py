"""Simulated hosts on one machine: network namespaces connected by links of a given rate.

Each host is a namespace with one interface, eth0, on a switch (a bridge in a separate namespace). A
token bucket at both ends of a cable limits the rate of each direction. Nothing outside these
namespaces is touched. They are always removed, those of a killed process by the next one.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

PREFIX = "dat"
RATES = {"100mbit": 1e8, "1gbit": 1e9, "2.5gbit": 2.5e9, "10gbit": 1e10, "25gbit": 2.5e10}
"""The named links, in bits per second."""
UNSHAPED = "unshaped"
SUBNET = "10.211.0"
MAX_HOSTS = 200


@dataclass(frozen=True)
class Host:
    """A namespace that simulates a machine."""

    namespace: str
    address: str
    interface: str = "eth0"

    def command(self, words: Sequence[str]) -> list[str]:
        """The command that runs `words` on this host."""
        return ["ip", "netns", "exec", self.namespace, *words] if self.namespace else list(words)


@contextmanager
def testbed(hosts: int, rate: str) -> Iterator[list[Host]]:
    """Hosts on a switch, each with a link of `rate`; `unshaped` does not limit it."""
    _check(hosts, rate)
    _remove_stale()
    prefix = f"{PREFIX}{os.getpid()}"
    simulated = [Host(f"{prefix}h{i}", f"{SUBNET}.{i + 1}") for i in range(hosts)]
    switch = f"{prefix}switch"
    with _interrupted_by_signals():
        try:
            _build(switch, simulated, rate)
            yield simulated
        finally:
            for namespace in [*(host.namespace for host in simulated), switch]:
                _remove(namespace)


def check_link(name: str) -> None:
    if name not in (*RATES, UNSHAPED):
        raise ValueError(f"link {name!r}: must be one of {', '.join((*RATES, UNSHAPED))}")


def _check(hosts: int, rate: str) -> None:
    check_link(rate)
    if not 1 <= hosts <= MAX_HOSTS:
        raise ValueError(f"{hosts} hosts: must be 1 to {MAX_HOSTS}")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise ValueError(f"--link needs {' and '.join(missing)}: install iproute2")
    if os.geteuid() != 0:
        raise ValueError("--link creates network namespaces, which needs root: use sudo")


def _build(switch: str, hosts: Sequence[Host], rate: str) -> None:
    _ip("netns", "add", switch)
    _ip("-n", switch, "link", "add", "br0", "type", "bridge")
    _ip("-n", switch, "link", "set", "br0", "up")
    for number, host in enumerate(hosts):
        port = f"port{number}"
        _ip("netns", "add", host.namespace)
        _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0",
            "netns", host.namespace)  # fmt: skip
        _ip("-n", switch, "link", "set", port, "master", "br0", "up")
        _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
        _ip("-n", host.namespace, "link", "set", "lo", "up")
        _ip("-n", host.namespace, "link", "set", "eth0", "up")
        if rate != UNSHAPED:
            _shape(host.namespace, "eth0", rate)
            _shape(switch, port, rate)


def _shape(namespace: str, interface: str, rate: str) -> None:
    """Limit the rate of one direction. A burst is what passes in a millisecond, but at least one
    packet of the largest size that the kernel hands over."""
    burst = max(int(RATES[rate] / 8 * 1e-3), 70_000)
    _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root",
         "tbf", "rate", rate, "burst", str(burst), "latency", "100ms")  # fmt: skip


def _remove_stale() -> None:
    """Remove the namespaces of processes that no longer exist."""
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        owner = re.fullmatch(rf"{PREFIX}(\d+)(h\d+|switch)", name)
        if owner and not os.path.exists(f"/proc/{owner[1]}"):
            _remove(name)


def _remove(namespace: str) -> None:
    """Kill the processes in a namespace and delete it; it need not exist."""
    pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    for pid in pids.stdout.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Let signals raise KeyboardInterrupt, so that the namespaces are removed. This includes
    SIGINT, which background processes of a shell ignore."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
