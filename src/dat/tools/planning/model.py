"""The time of a training step: the passes of the network, and the exchange of buckets beside them.

A worker attacks, takes a forward and a backward pass, and updates the weights. During the backward
pass buckets become ready, in order; what their exchange consists of the protocol itself says
(`Protocol.phases`). One thread collects the buckets, another one spreads them; torch's own
all-reduce has two threads that each take a whole bucket. All of them compete for the cores of a
machine, the link of a node and the links inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dat.distributed import PROTOCOLS, Protocol, Quantizer
from dat.distributed.phases import Phase, PlannedBucket, PlannedExchange
from dat.distributed.traffic import union_length
from dat.kernels.quantize.layout import FLOAT
from dat.tools.planning.cluster import Cluster
from dat.tools.planning.costs import Costs
from dat.tools.planning.gradient import Gradient
from dat.tools.planning.pipeline import Activity, run

ALL_REDUCE_THREADS = 2
"""Buckets that gloo sums at the same time."""


@dataclass(frozen=True, kw_only=True)
class ComputeTimes:
    """Seconds that a worker's step with its share of a batch takes without any exchange."""

    images: int
    """The worker's share."""
    before: float = 0.0
    """The attack, and all else before the passes of the update."""
    forward: float = 0.0
    backward: float
    after: float = 0.0
    """The optimizer, which does not depend on the images."""
    threads: int = 1
    """Cores that the worker keeps busy."""

    @property
    def total(self) -> float:
        return self.before + self.forward + self.backward + self.after

    def of(self, images: float, ratio: float = 1.0) -> ComputeTimes:
        """The same with another share, in proportion to the images; `ratio` is the time of a pass
        as a fraction of what it was."""
        ratio *= images / self.images
        return replace(
            self,
            images=max(round(images), 1),
            before=ratio * self.before,
            forward=ratio * self.forward,
            backward=ratio * self.backward,
        )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A predicted training step."""

    protocol: str
    bits: int
    workers: int
    step: float
    """Seconds."""
    alone: float
    """Seconds without any exchange."""
    communication: float
    """Seconds in which an exchange is under way: the paper's C, of one step."""
    sent: int
    """Bytes sent by all workers."""
    busiest: int
    """Bytes sent by the worker that sends most."""
    buffers: int
    """Bytes of message buffers at a worker."""
    binds: str
    """The bottleneck of the exchange."""

    @property
    def exposed(self) -> float:
        """Seconds of the exchange that are not hidden behind the passes."""
        return max(self.step - self.alone, 0.0)


def predict(
    gradient: Gradient,
    compute: ComputeTimes,
    *,
    protocol: str,
    quantizer: Quantizer,
    cluster: Cluster,
    costs: Costs,
) -> Prediction:
    """A step of all workers of the cluster, by the protocol of this name."""
    chosen = PROTOCOLS[protocol]()
    buckets = gradient.buckets(whole=quantizer.whole and chosen.staged)
    exchanges = [
        chosen.phases(PlannedBucket(bucket.slots, quantizer, cluster, costs.kernel))
        for bucket in buckets
    ]
    ready = [bucket.ready for bucket in buckets]
    lanes = partial(_lanes, exchanges, protocol=chosen, cluster=cluster, costs=costs)
    step, communication = _simulate(compute, cluster, ready=ready, lanes=lanes)
    alone, _ = _simulate(compute, cluster, ready=[], lanes=lambda filled: [])
    notes = FLOAT * gradient.extra_values * (cluster.workers - 1)
    return Prediction(
        protocol=protocol,
        bits=quantizer.bits,
        workers=cluster.workers,
        step=step,
        alone=alone,
        communication=communication,
        sent=sum(exchange.sent for exchange in exchanges) + notes * cluster.workers,
        busiest=sum(exchange.busiest for exchange in exchanges) + notes,
        buffers=sum(exchange.buffers for exchange in exchanges),
        binds=_bottleneck(exchanges, cluster, costs),
    )


def _simulate(
    compute: ComputeTimes,
    cluster: Cluster,
    *,
    ready: Sequence[float],
    lanes: Callable[[Sequence[Activity]], list[list[Activity]]],
) -> tuple[float, float]:
    """The end of the step, and the seconds in which an exchange was under way. `lanes` gives the
    activities of the threads that exchange, from those that fill the buckets."""

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
    activities = [activity for lane in threads for activity in lane]
    flights = [(activity.started or 0.0, activity.ended or 0.0) for activity in activities]
    return finish, union_length(flights)


def _work(
    seconds: float, cluster: Cluster, *, after: Sequence[Activity] = (), threads: int = 1
) -> Activity:
    """A computation of every worker."""
    busy = cluster.together * threads
    return Activity(seconds, {} if cluster.accelerated else {"cores": busy * seconds}, busy, after)


def _lanes(
    exchanges: Sequence[PlannedExchange],
    filled: Sequence[Activity],
    *,
    protocol: Protocol,
    cluster: Cluster,
    costs: Costs,
) -> list[list[Activity]]:
    """The activities of each thread that exchanges, in order."""
    if not protocol.staged:
        threads = 1 if cluster.accelerated else ALL_REDUCE_THREADS
        lanes: list[list[Activity]] = [[] for _ in range(threads)]
        for number, (exchange, ready) in enumerate(zip(exchanges, filled, strict=True)):
            lane = lanes[number % threads]
            lane += [
                activity(phase, cluster, costs=costs, after=(ready,)) for phase in exchange.collect
            ]
        return lanes
    buckets = [
        _both_stages(exchange, ready, cluster=cluster, costs=costs)
        for exchange, ready in zip(exchanges, filled, strict=True)
    ]
    if cluster.accelerated:  # a collective is only enqueued, so one thread does both stages
        return [[step for stages in buckets for stage in stages for step in stage]]
    return [[step for stages in buckets for step in stages[number]] for number in (0, 1)]


def _both_stages(
    exchange: PlannedExchange, ready: Activity, *, cluster: Cluster, costs: Costs
) -> tuple[list[Activity], list[Activity]]:
    """How a bucket is collected, once it is filled, and then spread."""
    collect = [_work(costs.bucket, cluster, after=(ready,))]
    collect += [activity(phase, cluster, costs=costs) for phase in exchange.collect]
    spread = [_work(costs.bucket, cluster, after=(collect[-1],))]
    spread += [activity(phase, cluster, costs=costs) for phase in exchange.spread]
    return collect, spread


def activity(
    phase: Phase, cluster: Cluster, *, costs: Costs, after: Sequence[Activity] = ()
) -> Activity:
    """A phase as the simulation sees it."""
    byte, stream = _per_byte(phase, cluster, costs)
    hop, message = _per_message(cluster, costs)
    slowest = max(
        phase.kernels,
        phase.worker_bytes * stream,
        max(phase.egress, phase.ingress) / cluster.link.bytes_per_second,
        phase.intra_node / cluster.inside.bytes_per_second,
    )
    least = phase.hops * hop + phase.messages * message + slowest
    cpu = phase.machine_bytes * byte + cluster.together * phase.messages * message
    demands = {"out": phase.egress, "into": phase.ingress, "inside": phase.intra_node}
    demands["cores"] = cpu + (0.0 if cluster.accelerated else phase.machine_kernels)
    busy = phase.machine_kernels / phase.kernels if phase.kernels and not phase.hops else None
    return Activity(least, demands, busy or cluster.together, after)


def _per_byte(phase: Phase, cluster: Cluster, costs: Costs) -> tuple[float, float]:
    """For a byte that a worker sends and receives, the seconds of cores, and the seconds that it
    takes at least. Devices send by themselves (nccl), as fast as their links."""
    if cluster.accelerated:
        return 0.0, 0.0
    return (costs.ring_byte, costs.ring_stream) if phase.all_reduce else (costs.byte, costs.stream)


def _per_message(cluster: Cluster, costs: Costs) -> tuple[float, float]:
    """Seconds until a message has arrived, and seconds of cores to send or to receive it."""
    latency = (cluster.link if cluster.nodes > 1 else cluster.inside).latency
    return (latency, 0.0) if cluster.accelerated else (latency + costs.latency, costs.message)


def capacities(cluster: Cluster) -> dict[str, float]:
    """How much of each resource is available per second."""
    link, inside = cluster.link.bytes_per_second, cluster.inside.bytes_per_second
    return {"cores": cluster.cores, "out": link, "into": link, "inside": inside}


def _bottleneck(exchanges: Sequence[PlannedExchange], cluster: Cluster, costs: Costs) -> str:
    """What the exchange would take longest for if nothing of it were hidden."""
    phases = [phase for exchange in exchanges for phase in (*exchange.collect, *exchange.spread)]
    if cluster.workers == 1:
        return "nothing"
    hop, message = _per_message(cluster, costs)
    link = cluster.link.bytes_per_second
    needs = {
        "latency": sum(phase.hops * hop + phase.messages * message for phase in phases),
        "link": max(sum(phase.egress for phase in phases), sum(phase.ingress for phase in phases))
        / link,
        "inside": sum(phase.intra_node for phase in phases) / cluster.inside.bytes_per_second,
        "kernels": sum(phase.kernels for phase in phases),
        "cores": sum(phase.machine_bytes * _per_byte(phase, cluster, costs)[0] for phase in phases)
        / cluster.cores,
    }
    return max(needs, key=lambda name: needs[name])
