"""A cluster as data: nodes, the devices in each, the links between and inside them, the cores."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

UNSHAPED = "unshaped"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
INSIDE = "100gbit"
"""Between the devices of a node, unless it is said: about what PCI Express 3 carries."""
LATENCY = 50e-6
"""Of a link between nodes: a switch, two network cards, the kernel at both ends."""
INSIDE_LATENCY = 10e-6
GOODPUT = 1448 / 1538
"""What is left of a link's rate for what is sent: of a packet of Ethernet, 1,448 of 1,538 bytes."""
MOST = 100_000


def read_rate(text: str) -> float:
    """Bits a second of `1gbit`, `2.5gbit`, `100mbit`; `unshaped` is as fast as a machine can."""
    if text == UNSHAPED:
        return float("inf")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]bit)", text.lower())
    if not found or float(found[1]) <= 0:
        raise ValueError(
            f"link {text!r}: must be a number with mbit or gbit, such as 1gbit or 2.5gbit, "
            f"or {UNSHAPED}"
        )
    return float(found[1]) * UNITS[found[2]]


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction of a cable; the other is as fast."""

    rate: float
    """Bits a second."""
    latency: float = LATENCY
    """Seconds from one end to the other of what takes no time to send."""
    goodput: float = GOODPUT
    """The share of the rate that is left for what is sent."""

    @property
    def bytes_per_second(self) -> float:
        return self.rate * self.goodput / 8

    @classmethod
    def named(cls, text: str, latency: float = LATENCY, goodput: float = GOODPUT) -> Link:
        return cls(rate=read_rate(text), latency=latency, goodput=goodput)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """p nodes of q devices, a worker each. Its devices share a node's link."""

    nodes: int
    devices: int = 1
    link: Link
    inside: Link
    cores: float = 2.0
    """Cores of a machine, for all workers on it."""
    shared: bool = False
    """All nodes are on one machine and share its cores, as network namespaces are."""
    accelerated: bool = False
    """Passes of the network and kernels run on a device of the worker's own, not on cores."""

    def __post_init__(self) -> None:
        for name in ("nodes", "devices"):
            if not 1 <= getattr(self, name) <= MOST:
                raise ValueError(f"--{name} {getattr(self, name)}: must be 1 to {MOST:,}")
        if self.cores <= 0:
            raise ValueError(f"--cores {self.cores}: must be above 0")

    @property
    def workers(self) -> int:
        return self.nodes * self.devices

    @property
    def together(self) -> int:
        """Workers that have the cores of a machine in common."""
        return self.workers if self.shared else self.devices

    def of(self, nodes: int) -> Cluster:
        """The same with another number of nodes."""
        return replace(self, nodes=nodes)
