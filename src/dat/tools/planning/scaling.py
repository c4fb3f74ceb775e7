"""Weak and strong scaling: the efficiency of larger clusters, and where it drops.

Weak scaling keeps the images per worker, so the batch grows. Strong scaling keeps the batch, so the
workers' shares shrink. Efficiency is the throughput relative to as many independent workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dat.tools.planning.advice import Alternative, Scheme, estimate, is_possible
from dat.tools.planning.cluster import Cluster
from dat.tools.planning.costs import Costs
from dat.tools.planning.recipe import RecipeProfile

MAX_WORKERS = 4096
"""Unless a larger cluster is planned."""
BEND = 0.8
BOTTLENECKS = {
    "latency": "latency: the number of sequential messages grows with the workers",
    "link": "the link between nodes",
    "inside": "the links inside a node",
    "kernels": "encoding and adding up",
    "cores": "the CPU time of TCP",
    "nothing": "nothing",
}


class ScalingPoint(NamedTuple):
    """One size of the cluster."""

    nodes: int
    workers: int
    share: float
    predicted: Alternative
    efficiency: float


@dataclass(frozen=True)
class ScalingCurve:
    """One scheme on clusters of increasing size."""

    kind: str
    """weak or strong"""
    name: str
    points: Sequence[ScalingPoint]

    @property
    def bend(self) -> ScalingPoint | None:
        """The first size whose efficiency is below BEND."""
        return next((point for point in self.points if point.efficiency < BEND), None)

    def explain(self) -> str:
        """Where the efficiency drops, and why."""
        head = f"{self.kind} scaling, {self.name}"
        bend = self.bend
        if bend is None:
            last = self.points[-1]
            return (
                f"{head}: {100 * last.efficiency:.0f} % efficiency at {last.workers:,} workers, "
                "the largest size considered."
            )
        step = bend.predicted.step
        if step.exposed < step.alone * 0.05:
            reason = "the part of a step that does not depend on the images (the optimizer)"
        else:
            reason = BOTTLENECKS[step.binds]
            if step.communication > 3 * (step.alone or 1e-12):
                reason += "; the passes are too short to overlap with much"
        return (
            f"{head}: below {100 * BEND:.0f} % from {bend.workers:,} workers on "
            f"({100 * bend.efficiency:.0f} %), limited by {reason}."
        )


def sizes(cluster: Cluster, max_workers: int = MAX_WORKERS) -> list[int]:
    """Numbers of nodes: the powers of two, and the cluster's own."""
    limit = max(max_workers // cluster.devices, cluster.nodes)
    powers = {1 << k for k in range(limit.bit_length()) if 1 << k <= limit}
    return sorted(powers | {cluster.nodes})


def scale(
    profile: RecipeProfile,
    cluster: Cluster,
    scheme: Scheme,
    *,
    costs: Costs,
    kind: str,
    batch: int,
) -> ScalingCurve:
    """`batch` is the global batch on `cluster`."""
    points = []
    name = ""
    for nodes in sizes(cluster):
        resized = cluster.of(nodes)
        share = batch / cluster.workers if kind == "weak" else batch / resized.workers
        if share < 1:
            break
        if resized.workers > 1 and not is_possible(scheme, resized):
            if nodes == 1:  # hybrid needs several nodes
                continue
            break
        predicted = estimate(profile, resized, scheme, costs=costs, share=share)
        single = profile.compute.of(batch if kind == "strong" else share).total
        ideal = single / resized.workers if kind == "strong" else single
        efficiency = ideal / predicted.step.step
        points.append(ScalingPoint(nodes, resized.workers, share, predicted, efficiency))
        name = predicted.name
    return ScalingCurve(kind, name, tuple(points))
