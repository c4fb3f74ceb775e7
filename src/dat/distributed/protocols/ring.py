"""Integers with common steps, summed by a ring all-reduce: one-sided, with few levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dat.core.lazy import torch
from dat.core.settings import SettingError
from dat.distributed.lazy import dist
from dat.distributed.phases import MessageContent, PlannedBucket, PlannedExchange
from dat.distributed.protocols.base import Protocol
from dat.distributed.routes import GradientBucket, GradientRoute, RoundingKeys
from dat.distributed.traffic import SentBytes, around_ring, ring_bytes
from dat.kernels.quantize.layout import FLOAT

if TYPE_CHECKING:
    from torch import Tensor

    from dat.distributed.quantizers import Quantizer


@dataclass(frozen=True, kw_only=True)
class Ring(Protocol):
    """Integers with common steps, summed in a ring: one-sided, with 127 / M levels."""

    BITS: ClassVar[int] = 8

    def check(self, quantizer: Quantizer, workers: int) -> None:
        if quantizer.bits != self.BITS:
            raise SettingError(
                f"protocol.name = ring: needs quantizer.bits = {self.BITS}, not {quantizer.bits}"
            )
        if workers > quantizer.levels:
            raise SettingError(
                f"protocol.name = ring: supports {quantizer.levels} workers, not {workers}; "
                "use chunked"
            )

    def levels(self, quantizer: Quantizer, workers: int) -> int:
        """The sum of all workers' codes must fit into the bits."""
        return quantizer.levels // workers

    def route(self, bucket: GradientBucket) -> GradientRoute:
        return RingRoute(bucket, self.levels(bucket.quantizer, bucket.world.size))

    def phases(self, bucket: PlannedBucket) -> PlannedExchange:
        layout, workers = bucket.message(), bucket.topology.workers
        content = MessageContent.of(layout)
        measure, encode, decode = (
            bucket.on_every_worker(bucket.kernel_seconds(kernel, content))
            for kernel in ("measure", "encode", "decode")
        )
        sizes = FLOAT * layout.steps, FLOAT * layout.floats, layout.codes
        steps, floats, codes = map(bucket.ring, sizes)
        sent = sum(ring_bytes(size, workers) for size in sizes)
        return PlannedExchange(
            collect=(measure, steps, encode),
            spread=(floats, codes, decode),
            sent=workers * sent,
            busiest=sent,
            buffers=layout.size,
        )


class RingRoute(GradientRoute):
    """The workers agree on common steps; then their codes are summed as they are, without loss."""

    def __init__(self, bucket: GradientBucket, levels: int) -> None:
        super().__init__(bucket, levels=levels)
        self.layout = bucket.whole()
        self.message = bucket.buffer(self.layout.size)
        first, second = FLOAT * self.layout.steps, FLOAT * (self.layout.steps + self.layout.floats)
        self.steps = self.message[:first].view(torch.float32)
        self.floats = self.message[first:second].view(torch.float32)
        self.codes = self.message[second:].view(torch.int8)

    def collect(self, x: Tensor, keys: RoundingKeys, group: dist.ProcessGroup) -> SentBytes:
        memory = self.memories[0] if self.memories else None
        if memory:
            memory.add_to(x, self.layout)
        self.codec.measure(x, self.layout, self.message)
        dist.all_reduce(self.steps, dist.ReduceOp.MAX, group=group)
        self.codec.encode(x, self.layout, self.message, keys.own, measured=True)
        if memory:
            memory.keep(x, self.layout, self.message, self.codec)
        return around_ring(self.steps, self.world)

    def spread(self, x: Tensor, group: dist.ProcessGroup) -> SentBytes:
        dist.all_reduce(self.floats, group=group)
        dist.all_reduce(self.codes, group=group)
        self.codec.decode(self.message, self.layout, x)
        return around_ring(self.floats, self.world).plus(around_ring(self.codes, self.world))
