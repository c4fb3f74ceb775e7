"""Optimizer steps for sharded layers, whose norms span all workers.

A step first computes the directions of all shards, then sums their squares over the workers in one
small collective, and then updates all parameters. The collective is passed in: only `distributed`
calls collectives, and the norms that torch computes of sharded tensors would need a collective
each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dat.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class ShardsLike(Protocol):
    """Access to this worker's shards, and sums over all shards."""

    def local(self, tensor: Tensor) -> Tensor:
        """This worker's shard of a tensor."""

    def like(self, local: Tensor, other: Tensor) -> Tensor:
        """A sharded tensor from its local shard, sharded as `other` is."""

    def total(self, values: Tensor) -> Tensor:
        """The sum over the workers that hold the other shards."""


class PendingUpdate(NamedTuple):
    """The update of a parameter group that waits for the norms of its layers; all tensors are
    local shards."""

    group: dict[str, Any]
    params: list[Tensor]
    u: list[Tensor]
    measured: list[Tensor]
    """The tensors whose norms the trust ratios depend on, besides those of the weights."""
    states: list[dict[str, Any]]


def local_state(state: dict[str, Any], shards: ShardsLike) -> dict[str, Any]:
    """This worker's shard of a parameter's state."""
    return {
        name: shards.local(value) if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }


def store_state(
    local: dict[str, Any], state: dict[str, Any], param: Tensor, shards: ShardsLike
) -> None:
    """Copy new entries of the local state into the parameter's; tensors are updated in place."""
    for name, value in local.items():
        if not isinstance(value, torch.Tensor):
            state[name] = value
        elif name not in state:
            state[name] = shards.like(value, param)


def unsharded_norms(local: Sequence[Tensor], shards: ShardsLike) -> Tensor:
    """The L2 norms of the full tensors, in one tensor."""
    squares = torch.stack(torch._foreach_norm(list(local), 2, torch.float64)).square_()
    return shards.total(squares).sqrt_().to(local[0].dtype)


def update_norms(
    updates: Sequence[PendingUpdate], shards: ShardsLike
) -> list[tuple[Tensor, Tensor]]:
    """For each update, the norms of its weights and of its `measured` tensors."""
    if not updates:
        return []
    tensors = [tensor for update in updates for tensor in (*update.params, *update.measured)]
    norms = unsharded_norms(tensors, shards)
    chunks = iter(norms.split([len(update.params) for update in updates for _ in range(2)]))
    return list(zip(chunks, chunks, strict=True))
