"""Sharded tensors: torch's DTensor, sharded along its first dimension.

Of n rows, worker k of M holds the k-th block of ceil(n / M); the last ones may hold fewer or none.
"""

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dat.core.settings import SettingError
from dat.distributed.collectives import all_reduce
from dat.distributed.traffic import Ledger, ring_bytes
from dat.distributed.world import World


class TensorShard(NamedTuple):
    """The rows of a tensor that one worker holds."""

    start: int
    rows: int
    shape: tuple[int, ...]
    """The shape of the unsharded tensor."""

    @property
    def as_slice(self) -> slice:
        return slice(self.start, self.start + self.rows)


def rows_of(shape: tuple[int, ...], size: int, rank: int) -> TensorShard:
    """The rows of a tensor that worker `rank` of `size` holds."""
    rows = -(-shape[0] // size)
    start = min(rank * rows, shape[0])
    return TensorShard(start, min(rows, shape[0] - start), shape)


def shard_of(tensor: Tensor) -> TensorShard | None:
    """The rows that this worker holds; `None` if the tensor is not sharded."""
    if not isinstance(tensor, DTensor):
        return None
    placements = enumerate(tensor.placements)
    (dim,) = (dim for dim, placement in placements if isinstance(placement, Shard))
    mesh = tensor.device_mesh
    return rows_of(tuple(tensor.shape), mesh.size(dim), mesh.get_local_rank(dim))


def local_tensor(tensor: Tensor) -> Tensor:
    """This worker's shard, detached; the tensor itself, detached, if it is not sharded."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def like(local: Tensor, other: Tensor) -> Tensor:
    """The tensor with this worker's shard `local` that is sharded like `other`; `local` itself if
    `other` is not sharded."""
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


def full_tensor(tensor: Tensor) -> Tensor:
    """The unsharded tensor, detached; all workers call it."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


class Shards:
    """The `size` consecutive ranks that hold the shards of one model. With more workers there are
    several such groups, and the workers with the same shard are replicas of each other (HSDP)."""

    def __init__(self, world: World, size: int, ledger: Ledger) -> None:
        check_shard(world.size, size)
        self.size, self.replicas = size, world.size // size
        self.replica, self.rank = divmod(world.rank, size)
        self.spans_nodes = world.spans_nodes(size)
        self._ledger = ledger
        limit = timedelta(seconds=world.timeout)
        groups: dict[str, Any] = {}
        ranks = torch.arange(world.size).reshape(-1, size)
        for name, rows in (("shard", ranks), ("replicate", ranks.T)):
            for members in rows.tolist():  # every worker has to create every group
                group = dist.new_group(members, timeout=limit)
                if world.rank in members:
                    groups[name] = group
        self.group: dist.ProcessGroup = groups["shard"]
        device_type = world.device.type
        if self.replicas == 1:
            self.mesh = DeviceMesh.from_group(self.group, device_type)
        else:
            self.mesh = DeviceMesh.from_group(
                [groups["replicate"], self.group],
                device_type,
                mesh=ranks,
                mesh_dim_names=("replicate", "shard"),
            )

    def local(self, tensor: Tensor) -> Tensor:
        return local_tensor(tensor)

    def like(self, local: Tensor, other: Tensor) -> Tensor:
        return like(local, other)

    def total(self, values: Tensor) -> Tensor:
        """The sum over the shards of one model, in place; the same bits on each of its workers."""
        finish = self._ledger.start_transfer()
        all_reduce(values, self.group)
        sent = ring_bytes(values.nbytes, self.size)
        finish(sent, sent if self.spans_nodes else 0)
        return values


def check_shard(workers: int, size: int) -> None:
    """Raise if the workers cannot be divided into groups of this size."""
    if size < 1 or workers % size:
        raise SettingError(
            f"comm.shard = {size}: must divide the number of workers, {workers}; {workers} shards "
            "over all of them, none turns sharding off"
        )
