"""Subgroups of workers that divide the work on the same images, with differentiable collectives.

The loss of an image depends on the outputs of all workers of its subgroup. Each worker computes
that loss and backpropagates it through its own outputs; the gradients that arrive at the image are
summed over the subgroup.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dat.distributed.collectives import all_gather, all_reduce
from dat.distributed.traffic import Ledger
from dat.distributed.world import World


class WorkerSubgroup:
    """The `size` consecutive ranks that this worker belongs to; with one rank, nothing is sent."""

    def __init__(self, world: World, size: int = 1, ledger: Ledger | None = None) -> None:
        check_subgroup(world.size, size)
        self.size = size
        self.number, self.rank = divmod(world.rank, size)
        self._device = world.device
        self._ledger = ledger or Ledger(world.device)
        self._group: Any = None
        self._spans_nodes = world.spans_nodes(size)
        if size == 1:
            return
        limit = timedelta(seconds=world.timeout)
        for first in range(0, world.size, size):  # every worker has to create every group
            group = dist.new_group(list(range(first, first + size)), timeout=limit)
            if first == self.number * size:
                self._group = group

    def share(self, count: int) -> range:
        """The indices, out of `count`, that this worker computes."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def spread(self, x: Tensor) -> Tensor:
        """The identity; the backward pass sums the gradient over the subgroup."""
        return x if self.size == 1 else _apply(_Spread, x, self)

    def total(self, values: Tensor) -> Tensor:
        """The sum over the subgroup; the backward pass is local, to this worker's own values."""
        return values if self.size == 1 else _apply(_Total, values, self)

    def logsumexp(self, values: Tensor) -> Tensor:
        """Logsumexp over the subgroup; the backward pass is local, as that of `total`."""
        return values if self.size == 1 else _apply(_LogSumExp, values, self)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the subgroup, without a gradient; the same bits on every worker."""
        values = values.clone(memory_format=torch.contiguous_format)
        finish = self._ledger.start_transfer()
        all_reduce(values, self._group)
        self._record(finish, 2 * values.nbytes * (self.size - 1) // self.size)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """The values of all workers of the subgroup, one row per rank, without a gradient."""
        values = values.contiguous()
        finish = self._ledger.start_transfer()
        rows = all_gather(values, self.size, self._group)
        self._record(finish, values.nbytes * (self.size - 1))
        return rows

    def min(self, number: int) -> int:
        """The minimum over the subgroup."""
        value = torch.tensor(number, device=self._device)
        finish = self._ledger.start_transfer()
        all_reduce(value, self._group, dist.ReduceOp.MIN)
        self._record(finish, 2 * value.nbytes * (self.size - 1) // self.size)
        return int(value)

    def _record(self, finish: Callable[..., None], sent: int) -> None:
        """If the subgroup spans nodes, count all its bytes as sent to another node."""
        finish(sent, sent if self._spans_nodes else 0)


def check_subgroup(workers: int, size: int) -> None:
    """Raise if the workers cannot be divided into subgroups of this size."""
    if size < 1 or workers % size:
        raise ValueError(
            f"train.team = {size}: must divide the number of workers, {workers}; 1 turns it off"
        )


def _apply(
    function: type[torch.autograd.Function], values: Tensor, subgroup: WorkerSubgroup
) -> Tensor:
    result: Tensor = function.apply(values, subgroup)
    return result


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, subgroup: WorkerSubgroup) -> Tensor:
        ctx.subgroup = subgroup
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.subgroup.sum(gradients[0]), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, subgroup: WorkerSubgroup) -> Tensor:
        return subgroup.sum(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, subgroup: WorkerSubgroup) -> Tensor:
        total = subgroup.gather(values).logsumexp(0)
        ctx.save_for_backward((values - total).exp())
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (share,) = ctx.saved_tensors
        return gradients[0] * share, None
