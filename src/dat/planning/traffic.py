"""What each protocol does with a bucket: who works how much, and what goes over which link.

The same routes as in `comm/routes.py`, told as phases. In a phase all workers wait for each other,
so the busiest one, the busiest link and what all workers on a machine need together decide. Bytes
come from the layouts of the messages (`comm/message.py`), not from formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from dat.comm.message import FLOAT, Message, Slot, compose, share_out, spans
from dat.comm.quantizer import Quantizer
from dat.planning.cluster import Cluster
from dat.planning.costs import Costs


class Phase(NamedTuple):
    """A part of an exchange at whose end all workers have waited for each other."""

    kernels: float = 0.0
    """Seconds of kernels of the busiest worker, in one thread."""
    all_kernels: float = 0.0
    """Of all workers on its machine."""
    out: float = 0.0
    """Bytes that leave the busiest node."""
    into: float = 0.0
    inside: float = 0.0
    """Bytes that the busiest device sends to others of its node."""
    handled: float = 0.0
    """Bytes that the busiest worker sends or gets, whichever is more."""
    all_handled: float = 0.0
    """Bytes that all workers on a machine send, and as many they get."""
    messages: float = 0.0
    """That the busiest worker sends and gets."""
    hops: int = 0
    """Messages that have to wait for each other."""
    rings: bool = False
    """By torch's own all-reduce, which adds up as well."""


class Stages(NamedTuple):
    """The way of one bucket."""

    collect: tuple[Phase, ...]
    spread: tuple[Phase, ...]
    sent: int
    """Bytes by all workers, as the ledger counts them."""
    busiest: int
    """Bytes by the worker that sends most."""
    buffers: int
    """Bytes that the busiest worker keeps for it."""


class Content(NamedTuple):
    """What messages hold: values that are sent as codes, and as floats."""

    codes: int
    floats: int

    @classmethod
    def of(cls, *messages: Message) -> Content:
        codes = sum(run.length for it in messages for run in it.runs if run.group)
        return cls(codes, sum(it.floats for it in messages))


class Shares(NamedTuple):
    """A gradient that is shared out: the size of every message, and what is in them."""

    size: int
    fullest: Content
    whole: Content


@lru_cache(maxsize=4096)
def share(slots: tuple[Slot, ...], quantizer: Quantizer, workers: int) -> Shares:
    """Kept: a sweep asks for the same ones again and again."""
    messages = share_out(spans(slots, quantizer), quantizer, workers)
    fullest = max(messages, key=lambda it: it.size)
    return Shares(fullest.size, Content.of(fullest), Content.of(*messages))


@dataclass(frozen=True)
class Way:
    """A bucket, and all that decides how it travels."""

    slots: tuple[Slot, ...]
    quantizer: Quantizer
    cluster: Cluster
    costs: Costs

    def whole(self) -> Message:
        return compose(spans(self.slots, self.quantizer), self.quantizer.bits)

    def kernel(self, job: str, content: Content) -> float:
        """Seconds of a thread for so many values."""
        price, bits = self.costs.kernel, self.quantizer.bits
        return content.codes * price(job, bits) + content.floats * price(job, 32)

    @property
    def remote(self) -> int:
        """Workers on other nodes."""
        return self.cluster.workers - self.cluster.devices


def gather(way: Way) -> Stages:
    """Every worker sends its message to every other one."""
    layout, n, m = way.whole(), way.cluster.workers, way.cluster.together
    content = Content.of(layout)
    encode, add = way.kernel("encode", content), n * way.kernel("add", content)
    sent = (n - 1) * layout.size
    wire = Phase(
        out=way.cluster.devices * way.remote * layout.size,
        into=way.cluster.devices * way.remote * layout.size,
        inside=(way.cluster.devices - 1) * layout.size,
        handled=sent,
        all_handled=m * sent,
        messages=2 * (n - 1),
        hops=1 if n > 1 else 0,
    )
    return Stages(
        (Phase(encode, m * encode),),
        (wire, Phase(add, m * add)),
        n * sent,
        sent,
        (n + 1) * layout.size,
    )


def server(way: Way) -> Stages:
    """All send to one worker, which adds up, quantizes again, and sends to all."""
    layout, n, m = way.whole(), way.cluster.workers, way.cluster.together
    content = Content.of(layout)
    encode, decode = way.kernel("encode", content), way.kernel("decode", content)
    serve = n * way.kernel("add", content) + encode
    sent, few = (n - 1) * layout.size, way.cluster.devices - 1
    link = max(way.remote, way.cluster.devices if way.remote else 0) * layout.size
    # on one machine every byte is sent and got there; of several the server's is the busiest
    handled = sent if way.cluster.shared else (sent + few * layout.size) / 2
    wire = Phase(
        inside=few * layout.size,
        handled=sent,
        all_handled=handled,
        messages=n - 1,
        hops=1 if n > 1 else 0,
    )
    return Stages(
        (
            Phase(encode, m * encode),
            wire._replace(into=link),
            Phase(serve, serve),
        ),
        (wire._replace(out=link), Phase(decode, m * decode)),
        2 * sent,
        sent,
        (n + 1) * layout.size,
    )


def chunked(way: Way) -> Stages:
    """Every worker is the server of one share of the gradient."""
    n = way.cluster.workers
    return _chunks(way, way.slots, n, (way.cluster.devices * way.remote, way.cluster.devices - 1))


def _chunks(way: Way, slots: tuple[Slot, ...], n: int, peers: tuple[int, int]) -> Stages:
    """An exchange of shares among n workers; of messages of one size, a node sends `peers[0]` to
    other nodes and a device `peers[1]` to others of its own."""
    (size, fullest, whole), m = share(slots, way.quantizer, n), way.cluster.together
    encode, decode = way.kernel("encode", whole), way.kernel("decode", whole)
    again = n * way.kernel("add", fullest) + way.kernel("encode", fullest)
    sent, first = (n - 1) * size, encode / n
    wire = Phase(
        out=peers[0] * size,
        into=peers[0] * size,
        inside=peers[1] * size,
        handled=sent,
        all_handled=m * sent,
        messages=2 * (n - 1),
        hops=1 if n > 1 else 0,
    )
    rest, late = encode - first, decode / n
    return Stages(
        (
            Phase(first, m * first),  # the others are written while the first is on its way
            wire._replace(kernels=rest, all_kernels=m * rest),
            Phase(again, m * again),
        ),
        (
            wire._replace(kernels=decode - late, all_kernels=m * (decode - late)),
            Phase(late, m * late),
        ),
        2 * n * sent,
        2 * sent,
        (2 * n + 1) * size,
    )


def ring(way: Way) -> Stages:
    """Common steps, then integers that are summed in a ring."""
    layout, m = way.whole(), way.cluster.together
    jobs = ("measure", "encode", "decode")
    measure, encode, decode = (way.kernel(job, Content.of(layout)) for job in jobs)
    steps, floats = FLOAT * layout.steps, FLOAT * layout.floats
    wires = [_ring_wire(way.cluster, size) for size in (steps, floats, layout.codes)]
    sent = sum(ring_bytes(size, way.cluster.workers) for size in (steps, floats, layout.codes))
    return Stages(
        (Phase(measure, m * measure), wires[0], Phase(encode, m * encode)),
        (*wires[1:], Phase(decode, m * decode)),
        way.cluster.workers * sent,
        sent,
        layout.size,
    )


def dense(way: Way) -> Stages:
    """An all-reduce of the floats in a ring."""
    size = FLOAT * sum(slot.length for slot in way.slots)
    sent = ring_bytes(size, way.cluster.workers)
    wire = _ring_wire(way.cluster, size)
    return Stages((wire,), (), way.cluster.workers * sent, sent, 0)


def _ring_wire(cluster: Cluster, size: int) -> Phase:
    """Workers stand in the ring node by node, so one of them sends to the next node."""
    n, m = cluster.workers, cluster.together
    sent = ring_bytes(size, n)
    return Phase(
        out=sent if cluster.nodes > 1 else 0,
        into=sent if cluster.nodes > 1 else 0,
        inside=sent if cluster.devices > 1 else 0,
        handled=sent,
        all_handled=m * sent,
        messages=4 * (n - 1),
        hops=2 * (n - 1),
        rings=True,
    )


def hybrid(way: Way) -> Stages:
    """Floats are summed inside a node, each device getting a share; the shares are exchanged in a
    few bits with the devices of the same number on other nodes; then shared again inside."""
    cluster = way.cluster
    q, p, m = cluster.devices, cluster.nodes, cluster.together
    floats = FLOAT * sum(slot.length for slot in way.slots)
    inside = (q - 1) * floats // q
    wire = Phase(
        inside=inside,
        handled=inside,
        all_handled=m * inside,
        messages=2 * (q - 1),
        hops=q - 1,
        rings=True,
    )
    inner = _chunks(way, _share(way.slots, q), p, (q * (p - 1), 0))
    within = (wire,) if q > 1 else ()
    return Stages(
        (*within, *inner.collect),
        (*inner.spread, *within),
        q * inner.sent + 2 * p * q * inside,
        inner.busiest + 2 * inside,
        inner.buffers + floats // q,
    )


def _share(slots: tuple[Slot, ...], parts: int) -> tuple[Slot, ...]:
    """The largest of the shares into which a bucket is cut: the first."""
    left = -(-sum(slot.length for slot in slots) // parts)
    found = []
    for slot in slots:
        length = min(slot.length, left)
        if length:
            shape = slot.shape if length == slot.length else (1, length)
            found.append(Slot(shape, slot.position))
        left -= length
    return tuple(found)


def ring_bytes(size: int, workers: int) -> int:
    """What one worker sends; `comm.routes` counts the same."""
    return 2 * (workers - 1) * size // workers


ROUTES: dict[str, Callable[[Way], Stages]] = {
    "dense": dense,
    "gather": gather,
    "server": server,
    "chunked": chunked,
    "ring": ring,
    "hybrid": hybrid,
}
