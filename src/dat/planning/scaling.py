"""Weak and strong scaling: how much of each further worker is left, and where it bends.

Weak: every worker keeps its share, the batch grows. Strong: the batch stays, shares shrink.
Efficiency is the images a second of all workers beside those of as many single ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dat.comm import Quantizer
from dat.planning.advice import Alternative, foresee, possible
from dat.planning.cluster import Cluster
from dat.planning.costs import Costs
from dat.planning.subject import Subject

WORKERS = 4096
"""At most, unless more are asked for."""
BEND = 0.8
WORDS = {
    "latency": "latency: messages that wait for each other grow with the workers",
    "link": "the link between nodes",
    "inside": "the links inside a node",
    "kernels": "encoding and adding up",
    "cores": "the cores, which TCP keeps busy",
    "nothing": "nothing",
}


class Point(NamedTuple):
    """One size of the cluster."""

    nodes: int
    workers: int
    share: float
    found: Alternative
    efficiency: float


@dataclass(frozen=True)
class Curve:
    """One way to exchange, over sizes of the cluster."""

    kind: str
    """weak or strong"""
    name: str
    points: Sequence[Point]

    @property
    def bend(self) -> Point | None:
        """The first size at which less than BEND is left."""
        return next((it for it in self.points if it.efficiency < BEND), None)

    def explain(self) -> str:
        """Where it bends, and why."""
        head = f"{self.kind} scaling, {self.name}"
        bend = self.bend
        if bend is None:
            last = self.points[-1]
            return (
                f"{head}: {100 * last.efficiency:.0f} % are left at {last.workers:,} workers, the "
                "most that was looked at."
            )
        step = bend.found.step
        if step.exposed < step.alone * 0.05:
            why = "what a step does whatever its images (the optimizer) is most of it"
        else:
            why = WORDS[step.binds]
            if step.communication > 3 * (step.alone or 1e-12):
                why += "; the passes are too short to hide anything behind"
        return (
            f"{head}: below {100 * BEND:.0f} % from {bend.workers:,} workers on "
            f"({100 * bend.efficiency:.0f} %), bound by {why}."
        )


def sizes(cluster: Cluster, most: int = WORKERS) -> list[int]:
    """Numbers of nodes: the powers of two, and the one that was asked for."""
    limit = max(most // cluster.devices, cluster.nodes)
    found = {1 << k for k in range(limit.bit_length()) if 1 << k <= limit}
    return sorted(found | {cluster.nodes})


def scale(
    subject: Subject,
    cluster: Cluster,
    way: tuple[str, Quantizer],
    *,
    costs: Costs,
    kind: str,
    batch: int,
) -> Curve:
    """`batch` is the global batch at the size that was asked for."""
    points = []
    name = ""
    for nodes in sizes(cluster):
        here = cluster.of(nodes)
        share = batch / cluster.workers if kind == "weak" else batch / here.workers
        protocol, quantizer = way
        if share < 1:
            break
        if here.workers > 1 and not possible(protocol, quantizer, here):
            if nodes == 1:  # hybrid inside a single node is a sum of floats
                continue
            break
        found = foresee(subject, here, way, costs=costs, share=share)
        single = subject.compute.of(batch if kind == "strong" else share).total
        ideal = single / here.workers if kind == "strong" else single
        points.append(Point(nodes, here.workers, share, found, ideal / found.step.step))
        name = found.name
    return Curve(kind, name, tuple(points))
