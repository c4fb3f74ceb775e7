"""The time of a training step: passes of the network, and an exchange of buckets beside them.

A worker attacks, takes a forward and a backward pass, and steps. During the backward pass buckets
become ready, in order. A thread collects them, another one spreads them; torch's own all-reduce
has two threads that each take a whole bucket. What is shared is shared: the cores of a machine, the
link of a node, the links inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dat.comm.ledger import covered
from dat.comm.quantizer import Quantizer
from dat.planning.cluster import Cluster
from dat.planning.costs import Costs
from dat.planning.gradient import Gradient
from dat.planning.pipeline import Activity, run
from dat.planning.traffic import ROUTES, Phase, Stages, Way

RING_THREADS = 2
"""Buckets that gloo sums at the same time."""


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Seconds of one worker alone, of a step with its share of a batch."""

    images: int
    """The worker's share."""
    before: float = 0.0
    """The attack, and all else before the update's own passes."""
    forward: float = 0.0
    backward: float
    after: float = 0.0
    """The optimizer, which does not depend on the images."""
    threads: int = 1
    """Cores that it keeps busy."""

    @property
    def total(self) -> float:
        return self.before + self.forward + self.backward + self.after

    def of(self, images: float) -> Compute:
        """With another share: in proportion to the images."""
        by = images / self.images
        return replace(
            self,
            images=max(round(images), 1),
            before=by * self.before,
            forward=by * self.forward,
            backward=by * self.backward,
        )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a step will be."""

    protocol: str
    bits: int
    workers: int
    step: float
    """Seconds."""
    alone: float
    """Seconds without any exchange."""
    communication: float
    """Seconds in which an exchange is under way: the paper's C, of a step."""
    sent: int
    """Bytes by all workers."""
    busiest: int
    """Bytes by the worker that sends most."""
    buffers: int
    """Bytes that the exchange keeps at a worker."""
    binds: str
    """What the exposed part is waiting for."""

    @property
    def exposed(self) -> float:
        return max(self.step - self.alone, 0.0)


def predict(
    gradient: Gradient,
    compute: Compute,
    *,
    protocol: str,
    quantizer: Quantizer,
    cluster: Cluster,
    costs: Costs,
) -> Prediction:
    """A step of all workers of the cluster."""
    buckets = gradient.buckets(whole=quantizer.whole and protocol != "dense")
    ways = [Way(bucket.slots, quantizer, cluster, costs) for bucket in buckets]
    stages = [ROUTES[protocol](way) for way in ways]
    if cluster.workers == 1 and protocol == "dense":
        stages = [Stages((), (), 0, 0, 0) for _ in stages]
    ready = [bucket.ready for bucket in buckets]
    lanes = partial(_lanes, protocol=protocol, cluster=cluster, costs=costs)
    step, communication = _simulate(compute, cluster, ready=ready, lanes=partial(lanes, stages))
    alone, _ = _simulate(compute, cluster, ready=[], lanes=lambda filled: [])
    told = 4 * gradient.told * (cluster.workers - 1)
    return Prediction(
        protocol=protocol,
        bits=quantizer.bits,
        workers=cluster.workers,
        step=step,
        alone=alone,
        communication=communication,
        sent=sum(it.sent for it in stages) + told * cluster.workers,
        busiest=sum(it.busiest for it in stages) + told,
        buffers=sum(it.buffers for it in stages),
        binds=_binds(stages, cluster, costs),
    )


def _simulate(
    compute: Compute,
    cluster: Cluster,
    *,
    ready: Sequence[float],
    lanes: Callable[[Sequence[Activity]], list[list[Activity]]],
) -> tuple[float, float]:
    """The end of the step, and the seconds in which an exchange was under way. `lanes` are what the
    threads do that exchange, once buckets are filled."""

    def work(seconds: float, after: Sequence[Activity] = ()) -> Activity:
        return _work(seconds, cluster, after=after, threads=compute.threads)

    begin = [work(compute.before), work(compute.forward)]
    parts, filled, done = [], [], 0.0
    for at in ready:
        parts.append(work((at - done) * compute.backward))
        filled.append(parts[-1])
        done = at
    parts.append(work((1 - done) * compute.backward))
    threads = lanes(filled)
    last = [lane[-1] for lane in threads if lane]
    end = work(compute.after, after=last)
    finish = run([[*begin, *parts, end], *threads], capacities(cluster))
    flights = [(it.started or 0.0, it.ended or 0.0) for lane in threads for it in lane]
    return finish, covered(flights)


def _work(
    seconds: float, cluster: Cluster, *, after: Sequence[Activity] = (), threads: int = 1
) -> Activity:
    """Something that every worker computes."""
    busy = cluster.together * threads
    return Activity(seconds, {} if cluster.accelerated else {"cores": busy * seconds}, busy, after)


def _lanes(
    stages: Sequence[Stages],
    filled: Sequence[Activity],
    *,
    protocol: str,
    cluster: Cluster,
    costs: Costs,
) -> list[list[Activity]]:
    """The threads that exchange, and what each does, one after the other."""
    if protocol == "dense":
        threads = 1 if cluster.accelerated else RING_THREADS
        lanes: list[list[Activity]] = [[] for _ in range(threads)]
        for number, (stage, ready) in enumerate(zip(stages, filled, strict=True)):
            lane = lanes[number % threads]
            lane += [
                activity(phase, cluster, costs=costs, after=(ready,)) for phase in stage.collect
            ]
        return lanes
    ways = [
        _both_stages(it, ready, cluster=cluster, costs=costs)
        for it, ready in zip(stages, filled, strict=True)
    ]
    if cluster.accelerated:  # a collective is only enqueued, so one thread does both
        return [[it for way in ways for stage in way for it in stage]]
    return [[it for way in ways for it in way[stage]] for stage in (0, 1)]


def _both_stages(
    stages: Stages, ready: Activity, *, cluster: Cluster, costs: Costs
) -> tuple[list[Activity], list[Activity]]:
    """How a bucket is collected, once it is filled, and then spread."""
    collect = [_work(costs.bucket, cluster, after=(ready,))]
    collect += [activity(phase, cluster, costs=costs) for phase in stages.collect]
    spread = [_work(costs.bucket, cluster, after=(collect[-1],))]
    spread += [activity(phase, cluster, costs=costs) for phase in stages.spread]
    return collect, spread


def activity(
    phase: Phase, cluster: Cluster, *, costs: Costs, after: Sequence[Activity] = ()
) -> Activity:
    """A phase as the simulation sees it."""
    byte, stream = _per_byte(phase, cluster, costs)
    hop, message = _per_message(cluster, costs)
    moves = max(
        phase.kernels,
        phase.handled * stream,
        max(phase.out, phase.into) / cluster.link.bytes_per_second,
        phase.inside / cluster.inside.bytes_per_second,
    )
    least = phase.hops * hop + phase.messages * message + moves
    cpu = phase.all_handled * byte + cluster.together * phase.messages * message
    demands = {"out": phase.out, "into": phase.into, "inside": phase.inside}
    demands["cores"] = cpu + (0.0 if cluster.accelerated else phase.all_kernels)
    busy = phase.all_kernels / phase.kernels if phase.kernels and not phase.hops else None
    return Activity(least, demands, busy or cluster.together, after)


def _per_byte(phase: Phase, cluster: Cluster, costs: Costs) -> tuple[float, float]:
    """Seconds of cores, and at least, for a byte that a worker sends and gets. Devices send by
    themselves (nccl), as fast as their links."""
    if cluster.accelerated:
        return 0.0, 0.0
    return (costs.ring_byte, costs.ring_stream) if phase.rings else (costs.byte, costs.stream)


def _per_message(cluster: Cluster, costs: Costs) -> tuple[float, float]:
    """Seconds until a message has arrived, and of cores to send or to get it."""
    latency = (cluster.link if cluster.nodes > 1 else cluster.inside).latency
    return (latency, 0.0) if cluster.accelerated else (latency + costs.latency, costs.message)


def capacities(cluster: Cluster) -> dict[str, float]:
    """Of each resource, what there is of it a second."""
    link, inside = cluster.link.bytes_per_second, cluster.inside.bytes_per_second
    return {"cores": cluster.cores, "out": link, "into": link, "inside": inside}


def _binds(stages: Sequence[Stages], cluster: Cluster, costs: Costs) -> str:
    """The most of what an exchange needs, were nothing hidden."""
    phases = [phase for stage in stages for phase in (*stage.collect, *stage.spread)]
    if cluster.workers == 1:
        return "nothing"
    hop, message = _per_message(cluster, costs)
    link = cluster.link.bytes_per_second
    needs = {
        "latency": sum(it.hops * hop + it.messages * message for it in phases),
        "link": max(sum(it.out for it in phases), sum(it.into for it in phases)) / link,
        "inside": sum(it.inside for it in phases) / cluster.inside.bytes_per_second,
        "kernels": sum(it.kernels for it in phases),
        "cores": sum(it.all_handled * _per_byte(it, cluster, costs)[0] for it in phases)
        / cluster.cores,
    }
    return max(needs, key=lambda name: needs[name])
