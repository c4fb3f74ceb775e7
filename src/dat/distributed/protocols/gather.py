"""Every worker sends its message to every other one: the paper's one-sided quantization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dat.distributed.phases import MessageContent, Phase, PlannedBucket, PlannedExchange
from dat.distributed.protocols.base import Protocol
from dat.distributed.routes import GradientBucket, GradientRoute, RoundingKeys
from dat.distributed.traffic import SentBytes, to_all_others
from dat.distributed.transport import all_gather

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Gather(Protocol):
    """All-gather of the quantized gradients: the paper's one-sided quantization."""

    def route(self, bucket: GradientBucket) -> GradientRoute:
        return GatherRoute(bucket)

    def phases(self, bucket: PlannedBucket) -> PlannedExchange:
        topology, size = bucket.topology, bucket.message().size
        content = MessageContent.of(bucket.message())
        workers, devices = topology.workers, topology.devices
        encode = bucket.kernel_seconds("encode", content)
        add_up = workers * bucket.kernel_seconds("add", content)
        sent = (workers - 1) * size
        send = Phase(
            egress=devices * bucket.remote_workers * size,
            ingress=devices * bucket.remote_workers * size,
            intra_node=(devices - 1) * size,
            worker_bytes=sent,
            machine_bytes=topology.together * sent,
            messages=2 * (workers - 1),
            hops=1 if workers > 1 else 0,
        )
        return PlannedExchange(
            collect=(bucket.on_every_worker(encode),),
            spread=(send, bucket.on_every_worker(add_up)),
            sent=workers * sent,
            busiest=sent,
            buffers=(workers + 1) * size,
        )


class GatherRoute(GradientRoute):
    """Every worker sends its message to every other one."""

    def __init__(self, bucket: GradientBucket) -> None:
        super().__init__(bucket)
        self.layout = bucket.whole()
        self.sent = bucket.buffer(self.layout.size)
        self.received = bucket.buffer(self.world.size, self.layout.size)

    def collect(self, x: Tensor, keys: RoundingKeys, group: dist.ProcessGroup) -> SentBytes:
        self.encode(x, self.layout, self.sent, keys.own)
        return SentBytes(0)

    def spread(self, x: Tensor, group: dist.ProcessGroup) -> SentBytes:
        all_gather(self.sent, self.received, group)
        self.codec.add_up(self.received, self.layout, x)
        return to_all_others(self.sent, self.world)
