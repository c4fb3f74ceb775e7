"""p nodes of q workers: floats inside a node, where links are fast, and few bits between nodes.

A bucket is cut into q stretches, one for each worker of a node, and each stretch into p shares, one
for each node. Inside a node every worker adds up its stretch of all the node's floats; workers of
the same local rank then exchange their stretch between the nodes as `chunked` does; at the end
every worker sends its stretch to the others of its node. What is quantized is a node's sum: there
are p roundings where `chunked` has M, and 1 / q of the bytes leaves a node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Self

from dat.core.lazy import torch
from dat.core.settings import SettingError, setting
from dat.distributed.phases import Phase, PlannedBucket, PlannedExchange, Topology
from dat.distributed.protocols.base import Protocol
from dat.distributed.protocols.chunked import exchange_of_shares
from dat.distributed.routes import GradientBucket, GradientRoute, RoundingKeys
from dat.distributed.traffic import SentBytes
from dat.distributed.transport import all_gather, all_to_all
from dat.distributed.wire_format import Slot

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

    from dat.distributed.quantizers import Quantizer
    from dat.distributed.world import World


@dataclass(frozen=True, kw_only=True)
class Hybrid(Protocol):
    """Floats inside a node, quantized between nodes: the paper's p nodes of q devices."""

    inside: int | None = setting(
        None, "workers per node; must divide the number of workers; none: as launched", ge=1
    )

    def check(self, quantizer: Quantizer, workers: int) -> None:
        if self.inside is not None and workers % self.inside:
            raise SettingError(
                f"protocol.inside = {self.inside}: must divide the number of workers, {workers}"
            )

    def resolve(self, world: World) -> Self:
        return self if self.inside is not None else replace(self, inside=world.workers_per_node())

    def sender(self, rank: int) -> int:
        """A node rounds its sum, whichever of its workers does."""
        assert self.inside is not None
        return rank // self.inside

    def route(self, bucket: GradientBucket) -> GradientRoute:
        assert self.inside is not None
        return HybridRoute(bucket, self.inside)

    def applicable(self, quantizer: Quantizer, topology: Topology) -> bool:
        """Several nodes of several devices; on others it is `chunked`, or a sum of floats."""
        return topology.devices > 1 and topology.nodes > 1

    def phases(self, bucket: PlannedBucket) -> PlannedExchange:
        """Planned for the nodes of the topology, whatever `inside` is. The stretches are taken to
        be of equal length, so the bytes are exact where a bucket can be cut evenly."""
        topology, floats = bucket.topology, bucket.float_bytes
        devices, nodes = topology.devices, topology.nodes
        inside = (devices - 1) * floats // devices
        sum_inside = Phase(
            intra_node=inside,
            worker_bytes=inside,
            machine_bytes=topology.together * inside,
            messages=2 * (devices - 1),
            hops=devices - 1,
            all_reduce=True,
        )
        stretch = replace(bucket, slots=_first_stretch(bucket.slots, devices))
        between = exchange_of_shares(
            stretch, nodes, leaving_node=devices * (nodes - 1), within_node=0
        )
        within_node = (sum_inside,) if devices > 1 else ()
        return PlannedExchange(
            collect=(*within_node, *between.collect),
            spread=(*between.spread, *within_node),
            sent=devices * between.sent + 2 * nodes * devices * inside,
            busiest=between.busiest + 2 * inside,
            buffers=between.buffers + floats // devices,
        )


def _first_stretch(slots: tuple[Slot, ...], stretches: int) -> tuple[Slot, ...]:
    """The first of the stretches into which a bucket is cut, which is the longest."""
    left = -(-sum(slot.length for slot in slots) // stretches)
    first = []
    for slot in slots:
        length = min(slot.length, left)
        if length:
            shape = slot.shape if length == slot.length else (1, length)
            first.append(Slot(shape, slot.position))
        left -= length
    return tuple(first)


class HybridRoute(GradientRoute):
    """Every worker is the server of one share for the nodes. Its neighbors are the workers of its
    node, its counterparts those of the same local rank on all nodes."""

    def __init__(self, bucket: GradientBucket, inside: int) -> None:
        super().__init__(bucket)
        self.nodes = self.world.size // inside
        self.node, self.local = divmod(self.world.rank, inside)
        self.neighbors = range(self.node * inside, (self.node + 1) * inside)
        self.counterparts = range(self.local, self.world.size, inside)
        shares = bucket.shares()
        first = self.local * self.nodes
        self.layouts = shares[first : first + self.nodes]
        ends = [0]
        for layout in shares:
            ends.append(max([ends[-1], *(run.start + run.length for run in layout.runs)]))
        cuts = ends[:: self.nodes]
        self.stretches = [slice(*cut) for cut in pairwise(cuts)]
        own_stretch = self.stretches[self.local]
        length = own_stretch.stop - own_stretch.start
        self.floats = torch.zeros(inside, length, device=self.world.device)
        size = max(layout.size for layout in shares)
        self.outgoing = bucket.buffer(self.nodes, size)
        self.incoming = bucket.buffer(self.nodes, size)
        self.own = bucket.buffer(size)

    def collect(self, x: Tensor, keys: RoundingKeys, group: dist.ProcessGroup) -> SentBytes:
        inside = self._sum_inside(x, group)

        def write(node: int) -> None:
            self.encode(x, self.layouts[node], self.outgoing[node], keys.own)

        all_to_all(self.outgoing, self.incoming, group, write, self.counterparts)
        own_layout = self.layouts[self.node]
        self.codec.add_up(self.incoming, own_layout, x)
        self.encode(x, own_layout, self.own, keys.common, hop=1)
        return inside.plus(self._between())

    def spread(self, x: Tensor, group: dist.ProcessGroup) -> SentBytes:
        def read(node: int) -> None:
            self.codec.decode(self.outgoing[node], self.layouts[node], x)

        all_gather(self.own, self.outgoing, group, read, self.counterparts)
        rows = [x[stretch] for stretch in self.stretches]
        own_row = rows[self.local]
        all_gather(own_row, rows, group, members=self.neighbors)
        return self._between().plus(SentBytes((len(self.neighbors) - 1) * own_row.nbytes))

    def _sum_inside(self, x: Tensor, group: dist.ProcessGroup) -> SentBytes:
        """The node's sum of this worker's stretch, in the order of its workers."""
        rows = [x[stretch] for stretch in self.stretches]
        all_to_all(rows, list(self.floats), group, members=self.neighbors)
        own_row = rows[self.local].copy_(self.floats[0])
        for floats in self.floats[1:]:
            own_row += floats
        return SentBytes(x.nbytes - own_row.nbytes)

    def _between(self) -> SentBytes:
        """What a worker sends to other nodes in one direction."""
        sent = (self.nodes - 1) * self.own.nbytes
        return SentBytes(sent, sent)
