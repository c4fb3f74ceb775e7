"""p nodes of q workers: floats inside a node, where links are fast, and few bits between nodes.

A bucket is cut into q stretches, one for each worker of a node, and each stretch into p shares, one
for each node. Inside a node every worker adds up its stretch of the neighbours' floats; workers of
the same local rank then exchange their stretch between the nodes as `chunked` does; at the end
every worker hands its stretch to its neighbours. What is quantized is a node's sum: there are p
roundings where `chunked` has M, and 1 / q of the bytes leaves a node.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from dat.comm.ledger import Load
from dat.comm.routes import Bucket, Keys, Route
from dat.comm.transport import publish, swap


class HybridRoute(Route):
    """Every worker is the server of one share, for the nodes; neighbours are on one node."""

    def __init__(self, bucket: Bucket, inside: int) -> None:
        super().__init__(bucket)
        self.nodes = self.world.size // inside
        self.node, self.local = divmod(self.world.rank, inside)
        self.neighbours = range(self.node * inside, (self.node + 1) * inside)
        self.counterparts = range(self.local, self.world.size, inside)
        shares = bucket.shares()
        first = self.local * self.nodes
        self.layouts = shares[first : first + self.nodes]
        ends = [0]
        for layout in shares:
            ends.append(max([ends[-1], *(run.start + run.length for run in layout.runs)]))
        cuts = ends[:: self.nodes]
        self.stretches = [slice(*cut) for cut in pairwise(cuts)]
        mine = self.stretches[self.local]
        self.floats = torch.zeros(inside, mine.stop - mine.start, device=self.world.device)
        size = max(layout.size for layout in shares)
        self.out = bucket.buffer(self.nodes, size)
        self.into = bucket.buffer(self.nodes, size)
        self.own = bucket.buffer(size)

    def collect(self, x: Tensor, keys: Keys, group: dist.ProcessGroup) -> Load:
        inside = self._add_up_inside(x, group)

        def write(node: int) -> None:
            self._write(x, self.layouts[node], self.out[node], keys.own)

        swap(self.out, self.into, group, write, self.counterparts)
        mine = self.layouts[self.node]
        self.codec.add_up(self.into, mine, x)
        self._write(x, mine, self.own, keys.common, hop=1)
        return inside.plus(self._between())

    def spread(self, x: Tensor, group: dist.ProcessGroup) -> Load:
        def read(node: int) -> None:
            self.codec.decode(self.out[node], self.layouts[node], x)

        publish(self.own, self.out, group, read, self.counterparts)
        stretch = x[self.stretches[self.local]]
        publish(stretch, [x[it] for it in self.stretches], group, circle=self.neighbours)
        return self._between().plus(Load((len(self.neighbours) - 1) * stretch.nbytes))

    def _add_up_inside(self, x: Tensor, group: dist.ProcessGroup) -> Load:
        """The node's sum of this worker's stretch, in the order of its workers."""
        rows = [x[it] for it in self.stretches]
        swap(rows, list(self.floats), group, circle=self.neighbours)
        mine = rows[self.local].copy_(self.floats[0])
        for floats in self.floats[1:]:
            mine += floats
        return Load(x.nbytes - mine.nbytes)

    def _between(self) -> Load:
        sent = (self.nodes - 1) * self.own.nbytes
        return Load(sent, sent)
