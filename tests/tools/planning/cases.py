"""Clusters and costs for the tests of the planner."""

from __future__ import annotations

from dat.tools.planning import Cluster, ComputeTimes, Costs, NetworkLink
from dat.tools.planning.costs import JOBS

FREE = Costs(
    kernels={job: {32: 0.0} for job in JOBS},
    byte=0.0,
    stream=0.0,
    ring_byte=0.0,
    ring_stream=0.0,
    message=0.0,
    latency=0.0,
    bucket=0.0,
)
"""A machine on which everything is free."""
NOTHING = ComputeTimes(images=1, backward=0.0)
FAST = NetworkLink(rate=float("inf"), latency=0.0, goodput=1.0)


def cluster(
    nodes: int, rate: float = float("inf"), *, devices: int = 1, latency: float = 0.0
) -> Cluster:
    """A cluster whose links have no overhead for headers."""
    link = NetworkLink(rate=rate, latency=latency, goodput=1.0)
    return Cluster(nodes=nodes, devices=devices, link=link, inside=FAST, cores=1e6)
