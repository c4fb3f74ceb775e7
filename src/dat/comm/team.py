"""Workers that share out the work on the same images, and the sums between them.

Gradients pass through these sums. An image's loss is a function of what all workers of its team
found; every one of them knows it and follows its gradient back through its own part, and what they
find at the image is added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dat.comm.ledger import Ledger
from dat.comm.world import World


class Team:
    """`size` neighbours among the workers; with one it costs nothing."""

    def __init__(self, world: World, size: int = 1, ledger: Ledger | None = None) -> None:
        check_team(world.size, size)
        self.size = size
        self.number, self.rank = divmod(world.rank, size)
        self._ledger = ledger or Ledger(world.device)
        self._group: Any = None
        self._leaves = size > world.local_size or world.local_size % size > 0
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

    @contextmanager
    def one_batch(self, model: nn.Module) -> Iterator[None]:
        """Batch normalisation over the team's images together: an image's copies are one batch,
        wherever they are."""
        norms = (
            [it for it in model.modules() if isinstance(it, _BatchNorm)] if self.size > 1 else []
        )
        with ExitStack() as stack:
            for norm in norms:
                norm.forward = _Together(norm, self)  # type: ignore[assignment]
                stack.callback(delattr, norm, "forward")
            yield

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


class _Together:
    """The forward pass of a batch normalisation whose batch is the whole team's."""

    def __init__(self, norm: _BatchNorm, team: Team) -> None:
        self.norm, self.team = norm, team
        self._alone: Callable[[Tensor], Tensor] = norm.forward

    def __call__(self, x: Tensor) -> Tensor:
        norm, team = self.norm, self.team
        if not norm.training:
            return self._alone(x)
        pixels = [0, *range(2, x.dim())]
        shape = (1, -1, *[1] * (x.dim() - 2))
        count = float(team.sum(torch.tensor(float(x.numel() // x.shape[1]), device=x.device)))
        # the sums have as many uses as workers: spread adds their gradients up
        mean = team.spread(team.total(x.sum(pixels)) / count)
        centred = x - mean.reshape(shape)
        variance = team.spread(team.total(centred.square().sum(pixels)) / count)
        self._remember(mean.detach(), variance.detach() * (count / max(count - 1, 1)))
        normal = centred * (variance + norm.eps).rsqrt().reshape(shape)
        if norm.affine:
            normal = normal * norm.weight.reshape(shape) + norm.bias.reshape(shape)
        return normal

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        norm = self.norm
        if norm.running_mean is None or norm.running_var is None:
            return
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked.add_(1)
        weight = norm.momentum
        if weight is None:
            weight = 1.0 / float(norm.num_batches_tracked)
        norm.running_mean.lerp_(mean, weight)
        norm.running_var.lerp_(variance, weight)
