"""Tensors of which every worker has a part: torch's DTensor, cut along its first dimension.

Of n rows worker k of M has the k-th ceil(n / M); the last ones may have fewer, or none.
"""

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dat.comm.ledger import Ledger
from dat.comm.routes import ring_bytes
from dat.comm.world import World
from dat.fields import SettingError


class Part(NamedTuple):
    """Some rows of a tensor."""

    start: int
    rows: int
    shape: tuple[int, ...]
    """Of the whole."""

    @property
    def place(self) -> slice:
        return slice(self.start, self.start + self.rows)


def cut(shape: tuple[int, ...], size: int, number: int) -> Part:
    """What worker `number` of `size` has of a tensor."""
    most = -(-shape[0] // size)
    start = min(number * most, shape[0])
    return Part(start, min(most, shape[0] - start), shape)


def part_of(tensor: Tensor) -> Part | None:
    """What this worker has of it; none if it is all here."""
    if not isinstance(tensor, DTensor):
        return None
    (along,) = (n for n, it in enumerate(tensor.placements) if isinstance(it, Shard))
    mesh = tensor.device_mesh
    return cut(tuple(tensor.shape), mesh.size(along), mesh.get_local_rank(along))


def local_of(tensor: Tensor) -> Tensor:
    """This worker's part itself, without a gradient; of a whole tensor all of it."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def like(local: Tensor, other: Tensor) -> Tensor:
    """A part as a tensor that is cut as `other` is; a whole tensor as it is."""
    if not isinstance(other, DTensor):
        return local
    return DTensor.from_local(
        local,
        other.device_mesh,
        other.placements,
        run_check=False,
        shape=other.shape,
        stride=other.stride(),
    )


def whole(tensor: Tensor) -> Tensor:
    """All of it, at every worker; all of them call this."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


class Shards:
    """`size` neighbours among the workers that have a model together; each group of neighbours has
    it once, and those with the same part are replicas of one another."""

    def __init__(self, world: World, size: int, ledger: Ledger) -> None:
        check_shard(world.size, size)
        self.size, self.replicas = size, world.size // size
        self.replica, self.rank = divmod(world.rank, size)
        self.leaves = world.leaves_node(size)
        self._ledger = ledger
        limit = timedelta(seconds=world.timeout)
        groups: dict[str, Any] = {}
        table = torch.arange(world.size).reshape(-1, size)
        for name, rows in (("shard", table), ("replicate", table.T)):
            for row in rows.tolist():  # all workers take part in making every group
                group = dist.new_group(row, timeout=limit)
                if world.rank in row:
                    groups[name] = group
        self.group: dist.ProcessGroup = groups["shard"]
        kind = world.device.type
        if self.replicas == 1:
            self.mesh = DeviceMesh.from_group(self.group, kind)
        else:
            self.mesh = DeviceMesh.from_group(
                [groups["replicate"], self.group],
                kind,
                mesh=table,
                mesh_dim_names=("replicate", "shard"),
            )

    def local(self, tensor: Tensor) -> Tensor:
        return local_of(tensor)

    def like(self, local: Tensor, other: Tensor) -> Tensor:
        return like(local, other)

    def total(self, values: Tensor) -> Tensor:
        """The sum over those that have the other parts, the same bits at every one."""
        land = self._ledger.open_flight()
        dist.all_reduce(values, group=self.group)
        sent = ring_bytes(values, self.size)
        land(sent, sent if self.leaves else 0)
        return values


def check_shard(workers: int, size: int) -> None:
    """Parts must come out even."""
    if size < 1 or workers % size:
        raise SettingError(
            f"comm.shard = {size}: must divide the number of workers, {workers}; {workers} shards "
            "over all of them, none not at all"
        )
