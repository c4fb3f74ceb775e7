"""Workers that share out the work on the same images, and the sums between them.

Gradients pass through these sums. An image's loss is a function of what all workers of its team
found; every one of them knows it and follows its gradient back through its own part, and what they
find at the image is added up.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dat.comm.ledger import Ledger
from dat.comm.world import World


class Team:
    """`size` neighbours among the workers; with one it costs nothing."""

    def __init__(self, world: World, size: int = 1, ledger: Ledger | None = None) -> None:
        check_team(world.size, size)
        self.size = size
        self.number, self.rank = divmod(world.rank, size)
        self._device = world.device
        self._ledger = ledger or Ledger(world.device)
        self._group: Any = None
        self._leaves = world.leaves_node(size)
        if size == 1:
            return
        limit = timedelta(seconds=world.timeout)
        for first in range(0, world.size, size):  # all workers take part in making every group
            group = dist.new_group(list(range(first, first + size)), timeout=limit)
            if first == self.number * size:
                self._group = group

    def share(self, count: int) -> range:
        """Which of `count` things are this worker's."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def spread(self, x: Tensor) -> Tensor:
        """`x` itself; its gradient is summed over the team."""
        return x if self.size == 1 else _apply(_Spread, x, self)

    def total(self, values: Tensor) -> Tensor:
        """The sum of the team's values; each worker's gradient is that of its own."""
        return values if self.size == 1 else _apply(_Total, values, self)

    def logsumexp(self, values: Tensor) -> Tensor:
        """log of the sum of exp over the team's values, with gradients as above."""
        return values if self.size == 1 else _apply(_LogSumExp, values, self)

    def sum(self, values: Tensor) -> Tensor:
        """The sum, without a gradient; the same bits at every worker."""
        values = values.clone(memory_format=torch.contiguous_format)
        land = self._ledger.open_flight()
        dist.all_reduce(values, group=self._group)
        self._land(land, 2 * values.nbytes * (self.size - 1) // self.size)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """Everybody's, one row a worker."""
        values = values.contiguous()
        rows = values.new_empty((self.size, *values.shape))
        land = self._ledger.open_flight()
        dist.all_gather(list(rows.unbind()), values, group=self._group)
        self._land(land, values.nbytes * (self.size - 1))
        return rows

    def least(self, number: int) -> int:
        """The lowest of the workers' numbers."""
        value = torch.tensor(number, device=self._device)
        land = self._ledger.open_flight()
        dist.all_reduce(value, dist.ReduceOp.MIN, group=self._group)
        self._land(land, 2 * value.nbytes * (self.size - 1) // self.size)
        return int(value)

    def _land(self, land: Callable[..., None], sent: int) -> None:
        """Of a team on several nodes, all that it says is taken to leave the node."""
        land(sent, sent if self._leaves else 0)


def check_team(workers: int, size: int) -> None:
    """Teams must come out even."""
    if size < 1 or workers % size:
        raise ValueError(
            f"train.team = {size}: must divide the number of workers, {workers}; 1 shares nothing"
        )


def _apply(function: type[torch.autograd.Function], values: Tensor, team: Team) -> Tensor:
    result: Tensor = function.apply(values, team)
    return result


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team) -> Tensor:
        ctx.team = team
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.team.sum(gradients[0]), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, team: Team) -> Tensor:
        return team.sum(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, team: Team) -> Tensor:
        total = team.gather(values).logsumexp(0)
        ctx.save_for_backward((values - total).exp())
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (share,) = ctx.saved_tensors
        return gradients[0] * share, None
