"""How a bucket of the gradient travels: what is encoded, which collectives carry it, who adds up.

An exchange has two stages: what the workers have is collected, and what became of it is spread.
Each stage has a thread and a process group of its own, so that one bucket is spread while the next
is still collected. All workers decode the same bytes in the same order, their own included, so that
their sums are equal to the last bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dat.comm.kernel import Codec
from dat.comm.ledger import Load
from dat.comm.message import FLOAT, Message, Run, Slot, compose, share_out, spans
from dat.comm.quantizer import Quantizer
from dat.comm.transport import publish, swap
from dat.comm.world import World


class Keys(NamedTuple):
    """What the rounding of one step depends on."""

    own: int
    """Differs from worker to worker."""
    common: int
    """For what is quantized a second time, by whoever does it."""


class Memory:
    """Error feedback: what rounding left over, by position in the whole gradient."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.left = torch.zeros(length, device=device)

    def recall(self, x: Tensor, layout: Message) -> None:
        for run in layout.runs:
            x[run.start : run.start + run.length] += self._of(run)

    def keep(self, x: Tensor, layout: Message, message: Tensor, codec: Codec) -> None:
        """Remember what the message does not say of x."""
        for run in layout.runs:
            self._of(run).copy_(x[run.start : run.start + run.length])
        codec.decode(message, layout.in_whole, self.left, "subtract")

    def _of(self, run: Run) -> Tensor:
        return self.left[run.position : run.position + run.length]


@dataclass(frozen=True)
class Bucket:
    """A part of the gradient that is exchanged in one go."""

    slots: Sequence[Slot]
    """The tensors that follow each other in it."""
    quantizer: Quantizer
    world: World
    memories: tuple[Memory, Memory] | None = None
    """With error feedback: of the first and of the second quantization."""

    def whole(self) -> Message:
        """One message with all of it."""
        return compose(spans(self.slots, self.quantizer), self.quantizer.bits)

    def shares(self) -> list[Message]:
        """A message for every worker's share."""
        return share_out(spans(self.slots, self.quantizer), self.quantizer, self.world.size)

    def buffer(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=self.world.device)


class Route(ABC):
    """The way of one bucket: its layout and its buffers, kept from step to step."""

    def __init__(self, bucket: Bucket, *, levels: int | None = None) -> None:
        self.world = bucket.world
        self.codec = Codec(bucket.quantizer, levels=levels)
        self._memories = bucket.memories

    @abstractmethod
    def collect(self, x: Tensor, keys: Keys, group: dist.ProcessGroup) -> Load:
        """Send what this worker has. Like `spread` it gives the bytes that this worker sent."""

    @abstractmethod
    def spread(self, x: Tensor, group: dist.ProcessGroup) -> Load:
        """Turn x into the sum over the workers."""

    def _write(self, x: Tensor, layout: Message, message: Tensor, key: int, hop: int = 0) -> None:
        memory = self._memories[hop] if self._memories else None
        if memory:
            memory.recall(x, layout)
        self.codec.encode(x, layout, message, key)
        if memory:
            memory.keep(x, layout, message, self.codec)


class GatherRoute(Route):
    """Every worker sends its message to every other one."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self.layout = bucket.whole()
        self.sent = bucket.buffer(self.layout.size)
        self.received = bucket.buffer(self.world.size, self.layout.size)

    def collect(self, x: Tensor, keys: Keys, group: dist.ProcessGroup) -> Load:
        self._write(x, self.layout, self.sent, keys.own)
        return Load(0)

    def spread(self, x: Tensor, group: dist.ProcessGroup) -> Load:
        publish(self.sent, self.received, group, lambda rank: None)
        self.codec.add_up(self.received, self.layout, x)
        return to_all_others(self.sent, self.world)


class ServerRoute(Route):
    """All send to one worker, which adds up, quantizes again, and sends to all."""

    def __init__(self, bucket: Bucket, server: int) -> None:
        super().__init__(bucket)
        self.server = server
        self.serves = self.world.rank == server
        self.layout = bucket.whole()
        self.sent = bucket.buffer(self.layout.size)
        self.received = bucket.buffer(self.world.size if self.serves else 0, self.layout.size)

    def collect(self, x: Tensor, keys: Keys, group: dist.ProcessGroup) -> Load:
        self._write(x, self.layout, self.sent, keys.own)
        rows = list(self.received) if self.serves else None
        dist.gather(self.sent, rows, dst=self.server, group=group)
        if not self.serves:
            near = self.server in self._neighbours()
            return Load(self.sent.nbytes, 0 if near else self.sent.nbytes)
        self.codec.add_up(self.received, self.layout, x)
        self._write(x, self.layout, self.received[0], keys.common, hop=1)
        return Load(0)

    def spread(self, x: Tensor, group: dist.ProcessGroup) -> Load:
        rows = [self.received[0]] * self.world.size if self.serves else None
        dist.scatter(self.sent, rows, src=self.server, group=group)
        self.codec.decode(self.sent, self.layout, x)
        return to_all_others(self.sent, self.world) if self.serves else Load(0)

    def _neighbours(self) -> range:
        """Who is on this worker's node."""
        first = self.world.rank - self.world.local_rank
        return range(first, first + self.world.local_size)


class ChunkedRoute(Route):
    """Every worker is the server of one share of the gradient."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self.layouts = bucket.shares()
        size = max(layout.size for layout in self.layouts)
        self.out = bucket.buffer(self.world.size, size)
        self.into = bucket.buffer(self.world.size, size)
        self.own = bucket.buffer(size)

    def collect(self, x: Tensor, keys: Keys, group: dist.ProcessGroup) -> Load:
        def write(rank: int) -> None:
            self._write(x, self.layouts[rank], self.out[rank], keys.own)

        swap(self.out, self.into, group, write)
        mine = self.layouts[self.world.rank]
        self.codec.add_up(self.into, mine, x)
        self._write(x, mine, self.own, keys.common, hop=1)
        return to_all_others(self.own, self.world)

    def spread(self, x: Tensor, group: dist.ProcessGroup) -> Load:
        def read(rank: int) -> None:
            self.codec.decode(self.out[rank], self.layouts[rank], x)

        publish(self.own, self.out, group, read)
        return to_all_others(self.own, self.world)


class RingRoute(Route):
    """The workers agree on common steps; then their codes are added as they are, without loss."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket, levels=bucket.quantizer.levels // bucket.world.size)
        self.layout = bucket.whole()
        self.message = bucket.buffer(self.layout.size)
        first, second = FLOAT * self.layout.steps, FLOAT * (self.layout.steps + self.layout.floats)
        self.steps = self.message[:first].view(torch.float32)
        self.floats = self.message[first:second].view(torch.float32)
        self.codes = self.message[second:].view(torch.int8)

    def collect(self, x: Tensor, keys: Keys, group: dist.ProcessGroup) -> Load:
        memory = self._memories[0] if self._memories else None
        if memory:
            memory.recall(x, self.layout)
        self.codec.measure(x, self.layout, self.message)
        dist.all_reduce(self.steps, dist.ReduceOp.MAX, group=group)
        self.codec.encode(x, self.layout, self.message, keys.own, measured=True)
        if memory:
            memory.keep(x, self.layout, self.message, self.codec)
        return around(self.steps, self.world)

    def spread(self, x: Tensor, group: dist.ProcessGroup) -> Load:
        dist.all_reduce(self.floats, group=group)
        dist.all_reduce(self.codes, group=group)
        self.codec.decode(self.message, self.layout, x)
        return around(self.floats, self.world).plus(around(self.codes, self.world))


def to_all_others(message: Tensor, world: World) -> Load:
    """What one worker sends that tells everybody the same, or as much."""
    return Load((world.size - 1) * message.nbytes, (world.size - world.local_size) * message.nbytes)


def ring_bytes(tensor: Tensor, workers: int) -> int:
    """What one of so many workers sends in a ring: each of M chunks passes on M - 1 times to be
    summed and M - 1 times to be spread."""
    return 2 * (workers - 1) * tensor.nbytes // workers


def around(tensor: Tensor, world: World) -> Load:
    """What one worker sends in a ring of all; the last one of a node sends to the next node."""
    sent = ring_bytes(tensor, world.size)
    leaves = world.local_rank + 1 == world.local_size < world.size
    return Load(sent, sent if leaves else 0)
