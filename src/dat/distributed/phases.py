"""The vocabulary in which a protocol describes its exchange to the planner (`Protocol.phases`).

An exchange of a bucket is a sequence of phases. At the end of a phase all workers have waited for
each other, so that the busiest worker, the busiest link and the total of all workers on a machine
decide how long it takes. Bytes come from the layouts of the messages (`wire_format`), not from
formulas. The planner computes how long a phase takes on a given cluster.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from dat.distributed.quantizers import Quantizer
from dat.distributed.traffic import ring_bytes
from dat.distributed.wire_format import Slot, chunk_layouts, message_layout, spans
from dat.kernels.quantize.layout import FLOAT, MessageLayout

KernelPrice = Callable[[str, int], float]
"""Seconds per value on one thread, by kernel (encode, decode, add, measure) and bits; for `add`,
per message that is added."""


class Phase(NamedTuple):
    """A part of an exchange, at the end of which all workers have waited for each other."""

    kernels: float = 0.0
    """Seconds of one thread for the kernels of the busiest worker."""
    machine_kernels: float = 0.0
    """The same for all workers on its machine."""
    egress: float = 0.0
    """Bytes that leave the busiest node."""
    ingress: float = 0.0
    """Bytes that enter the busiest node."""
    intra_node: float = 0.0
    """Bytes that the busiest device sends to others of its node."""
    worker_bytes: float = 0.0
    """Bytes that the busiest worker sends, or those that it receives, whichever are more."""
    machine_bytes: float = 0.0
    """Bytes that all workers on a machine send; they receive as many."""
    messages: float = 0.0
    """Messages that the busiest worker sends and receives."""
    hops: int = 0
    """Messages in sequence, each of which waits for the previous one."""
    all_reduce: bool = False
    """Whether torch's own all-reduce transfers and adds the values."""


class PlannedExchange(NamedTuple):
    """The exchange of one bucket, as planned."""

    collect: tuple[Phase, ...]
    spread: tuple[Phase, ...]
    sent: int
    """Bytes sent by all workers, as the ledger counts them."""
    busiest: int
    """Bytes sent by the worker that sends most."""
    buffers: int
    """Bytes of message buffers at the busiest worker."""


class Topology(typing.Protocol):
    """Where the workers are: one on each of the devices of every node."""

    @property
    def nodes(self) -> int: ...
    @property
    def devices(self) -> int:
        """Workers on each node."""

    @property
    def workers(self) -> int: ...
    @property
    def shared(self) -> bool:
        """All nodes are on one machine."""

    @property
    def together(self) -> int:
        """Workers on one machine."""


class MessageContent(NamedTuple):
    """Values in messages: those that are sent as codes, and those that are sent as floats."""

    codes: int
    floats: int

    @classmethod
    def of(cls, *messages: MessageLayout) -> MessageContent:
        runs = [run for message in messages for run in message.runs]
        codes = sum(run.length for run in runs if run.group)
        return cls(codes, sum(message.floats for message in messages))


class ShareSizes(NamedTuple):
    """The sizes of a bucket's messages if it is divided among workers."""

    size: int
    """Bytes of each message."""
    fullest: MessageContent
    """Of the largest message."""
    whole: MessageContent
    """Of all messages."""


@lru_cache(maxsize=4096)
def share_sizes(slots: tuple[Slot, ...], quantizer: Quantizer, workers: int) -> ShareSizes:
    """The sizes of a bucket's shares. Cached, as a sweep repeats the same ones."""
    messages = chunk_layouts(spans(slots, quantizer), quantizer, workers)
    fullest = max(messages, key=lambda message: message.size)
    return ShareSizes(fullest.size, MessageContent.of(fullest), MessageContent.of(*messages))


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket of the gradient, and all that its exchange depends on."""

    slots: tuple[Slot, ...]
    """The tensors in it, in order."""
    quantizer: Quantizer
    topology: Topology
    kernel_price: KernelPrice

    @property
    def float_bytes(self) -> int:
        """Bytes of the bucket in floats."""
        return FLOAT * sum(slot.length for slot in self.slots)

    @property
    def remote_workers(self) -> int:
        """Workers on other nodes than a given one."""
        return self.topology.workers - self.topology.devices

    def message(self) -> MessageLayout:
        """The layout of one message with the whole bucket."""
        return message_layout(spans(self.slots, self.quantizer), self.quantizer.bits)

    def kernel_seconds(self, kernel: str, content: MessageContent) -> float:
        """Seconds of one thread for a kernel over a message's values."""
        price, bits = self.kernel_price, self.quantizer.bits
        return content.codes * price(kernel, bits) + content.floats * price(kernel, 32)

    def on_every_worker(self, seconds: float) -> Phase:
        """A phase in which every worker computes for this many seconds."""
        return Phase(seconds, self.topology.together * seconds)

    def ring(self, size: int) -> Phase:
        """A ring all-reduce of `size` bytes. The ring passes through the nodes one after the other:
        one worker of each sends to the next node."""
        topology = self.topology
        sent = ring_bytes(size, topology.workers)
        between = sent if topology.nodes > 1 else 0
        return Phase(
            egress=between,
            ingress=between,
            intra_node=sent if topology.devices > 1 else 0,
            worker_bytes=sent,
            machine_bytes=topology.together * sent,
            messages=4 * (topology.workers - 1),
            hops=2 * (topology.workers - 1),
            all_reduce=True,
        )
