"""A description of a cluster: nodes, devices per node, the links between and inside them, cores."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

UNSHAPED = "unshaped"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
INSIDE = "100gbit"
"""Default rate between the devices of a node: about that of PCI Express 3."""
LATENCY = 50e-6
"""Seconds, between nodes: a switch, two network cards, the kernel at both ends."""
INSIDE_LATENCY = 10e-6
GOODPUT = 1448 / 1538
"""The share of a link's rate that carries payload: 1,448 of the 1,538 bytes of a packet."""
LARGEST = 100_000


def read_rate(text: str) -> float:
    """Bits per second of `1gbit`, `2.5gbit`, `100mbit`; `unshaped` is unlimited."""
    if text == UNSHAPED:
        return float("inf")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]bit)", text.lower())
    if not match or float(match[1]) <= 0:
        raise ValueError(
            f"link {text!r}: must be a number with mbit or gbit, such as 1gbit or 2.5gbit, "
            f"or {UNSHAPED}"
        )
    return float(match[1]) * UNITS[match[2]]


@dataclass(frozen=True, kw_only=True)
class NetworkLink:
    """A link with the same rate in both directions."""

    rate: float
    """Bits per second."""
    latency: float = LATENCY
    """Seconds that an empty message takes."""
    goodput: float = GOODPUT
    """The share of the rate that carries payload."""

    @property
    def bytes_per_second(self) -> float:
        return self.rate * self.goodput / 8

    @classmethod
    def named(cls, text: str, latency: float = LATENCY, goodput: float = GOODPUT) -> NetworkLink:
        return cls(rate=read_rate(text), latency=latency, goodput=goodput)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes with one worker per device; the devices of a node share its link."""

    nodes: int
    devices: int = 1
    link: NetworkLink
    inside: NetworkLink
    cores: float = 2.0
    """Cores per machine, shared by the workers on it."""
    shared: bool = False
    """All nodes are simulated on one machine and share its cores."""
    accelerated: bool = False
    """Passes and kernels run on an accelerator per worker, not on the cores."""

    def __post_init__(self) -> None:
        for name in ("nodes", "devices"):
            if not 1 <= getattr(self, name) <= LARGEST:
                raise ValueError(f"--{name} {getattr(self, name)}: must be 1 to {LARGEST:,}")
        if self.cores <= 0:
            raise ValueError(f"--cores {self.cores}: must be above 0")

    @property
    def workers(self) -> int:
        return self.nodes * self.devices

    @property
    def together(self) -> int:
        """Workers that share the cores of a machine."""
        return self.workers if self.shared else self.devices

    def of(self, nodes: int) -> Cluster:
        """The same cluster with another number of nodes."""
        return replace(self, nodes=nodes)
