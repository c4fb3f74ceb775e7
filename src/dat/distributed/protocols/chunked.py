"""Every worker is the server of one share of the gradient: two-sided, without a bottleneck."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dat.distributed.phases import Phase, PlannedBucket, PlannedExchange, share_sizes
from dat.distributed.protocols.base import Protocol
from dat.distributed.routes import GradientBucket, GradientRoute, RoundingKeys
from dat.distributed.traffic import SentBytes, to_all_others
from dat.distributed.transport import all_gather, all_to_all

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Chunked(Protocol):
    """Every worker is the server of one share: two-sided, and no worker is a bottleneck."""

    def sharding_conflict(self) -> str:
        return ""

    def route(self, bucket: GradientBucket) -> GradientRoute:
        return ChunkedRoute(bucket)

    def phases(self, bucket: PlannedBucket) -> PlannedExchange:
        topology = bucket.topology
        return exchange_of_shares(
            bucket,
            topology.workers,
            leaving_node=topology.devices * bucket.remote_workers,
            within_node=topology.devices - 1,
        )


def exchange_of_shares(
    bucket: PlannedBucket, workers: int, *, leaving_node: int, within_node: int
) -> PlannedExchange:
    """The phases of a bucket that is divided among this many workers. In each direction a node
    sends `leaving_node` messages to other nodes, and a device `within_node` to others of its
    node."""
    size, fullest, whole = share_sizes(bucket.slots, bucket.quantizer, workers)
    together = bucket.topology.together
    encode = bucket.kernel_seconds("encode", whole)
    decode = bucket.kernel_seconds("decode", whole)
    add_up = workers * bucket.kernel_seconds("add", fullest)
    encode_again = bucket.kernel_seconds("encode", fullest)
    # one message is encoded before the others are, while it is on its way; one is decoded last
    first_encode, last_decode = encode / workers, decode / workers
    encode_rest, decode_rest = encode - first_encode, decode - last_decode
    sent = (workers - 1) * size
    send = Phase(
        egress=leaving_node * size,
        ingress=leaving_node * size,
        intra_node=within_node * size,
        worker_bytes=sent,
        machine_bytes=together * sent,
        messages=2 * (workers - 1),
        hops=1 if workers > 1 else 0,
    )
    return PlannedExchange(
        collect=(
            bucket.on_every_worker(first_encode),
            send._replace(kernels=encode_rest, machine_kernels=together * encode_rest),
            bucket.on_every_worker(add_up + encode_again),
        ),
        spread=(
            send._replace(kernels=decode_rest, machine_kernels=together * decode_rest),
            bucket.on_every_worker(last_decode),
        ),
        sent=2 * workers * sent,
        busiest=2 * sent,
        buffers=(2 * workers + 1) * size,
    )


class ChunkedRoute(GradientRoute):
    """Every worker is the server of one share of the gradient."""

    def __init__(self, bucket: GradientBucket) -> None:
        super().__init__(bucket)
        self.layouts = bucket.shares()
        size = max(layout.size for layout in self.layouts)
        self.outgoing = bucket.buffer(self.world.size, size)
        self.incoming = bucket.buffer(self.world.size, size)
        self.own = bucket.buffer(size)

    def collect(self, x: Tensor, keys: RoundingKeys, group: dist.ProcessGroup) -> SentBytes:
        def write(rank: int) -> None:
            self.encode(x, self.layouts[rank], self.outgoing[rank], keys.own)

        all_to_all(self.outgoing, self.incoming, group, write)
        own_layout = self.layouts[self.world.rank]
        self.codec.add_up(self.incoming, own_layout, x)
        self.encode(x, own_layout, self.own, keys.common, hop=1)
        return to_all_others(self.own, self.world)

    def spread(self, x: Tensor, group: dist.ProcessGroup) -> SentBytes:
        def read(rank: int) -> None:
            self.codec.decode(self.outgoing[rank], self.layouts[rank], x)

        all_gather(self.own, self.outgoing, group, read)
        return to_all_others(self.own, self.world)
