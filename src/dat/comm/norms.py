"""Over which images batch normalisation goes: a worker's share, several workers' shares together,
or a share in groups.

torch's SyncBatchNorm refuses tensors on CPUs. Here the forward pass of a model's batch norms is
replaced for the time of a pass, whatever their class; in eval mode they do what they always do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from dat.comm.ledger import Ledger
from dat.comm.team import Team
from dat.comm.world import World

NORMS = ("local", "sync", "ghost")
Forward = Callable[[Tensor], Tensor]


class Norms:
    """Batch normalisation over the images of a circle of workers, or in groups of one's own. A
    circle of one without groups leaves torch's alone."""

    def __init__(self, circle: Team, *, group: int | None = None) -> None:
        self.circle, self.group = circle, group

    @classmethod
    def of(cls, kind: str, team: Team, *, world: World, ledger: Ledger, group: int) -> Norms:
        """`local`: a team's images are one batch, since it shares out the copies of each; `sync`:
        all workers' are; `ghost`: so many of a worker's own at a time."""
        if kind == "sync" and team.size < world.size:
            return cls(Team(world, world.size, ledger))
        return cls(team, group=group if kind == "ghost" else None)

    @contextmanager
    def over(self, model: nn.Module, images: int) -> Iterator[None]:
        """For a pass of so many images, each of which may be there several times (clean, attacked,
        with noise): row r is of image r modulo `images`."""
        meets = self.circle.size > 1
        wanted = meets or (self.group is not None and images > self.group)
        norms = [it for it in model.modules() if isinstance(it, _BatchNorm)] if wanted else []
        with ExitStack() as stack:
            for norm in norms:
                way: Forward = norm.forward
                if meets:
                    norm.forward = _Together(norm, way, self.circle)  # type: ignore[assignment]
                else:
                    norm.forward = _Ghosts(norm, way, images, self._cuts(images))  # type: ignore[assignment]
                stack.callback(delattr, norm, "forward")
            yield

    def fewest(self, count: int) -> int:
        """The lowest of the circle's numbers: batch norms that meet need as many passes each."""
        return self.circle.least(count) if self.circle.size > 1 else count

    def _cuts(self, images: int) -> list[tuple[int, int]]:
        """Groups of at most that size, as equal as may be: of 33 images in groups of 32 the last
        one alone would have next to nothing to be normalised by."""
        assert self.group is not None
        groups = -(-images // self.group)
        return list(pairwise(number * images // groups for number in range(groups + 1)))


class _Together:
    """The forward pass of a batch norm whose batch is a whole circle's."""

    def __init__(self, norm: _BatchNorm, alone: Forward, circle: Team) -> None:
        self.norm, self.alone, self.circle = norm, alone, circle

    def __call__(self, x: Tensor) -> Tensor:
        norm = self.norm
        if not norm.training:
            return self.alone(x)
        _count(norm)
        kind = torch.promote_types(x.dtype, torch.float32)  # sums of halves would be worth nothing
        mean, variance, count = self._statistics(x.to(kind))
        _remember(norm, mean, variance * (count / (count - 1).clamp_min(1)))
        scale = (variance + norm.eps).rsqrt()
        if norm.affine:
            scale = scale * norm.weight
        shift = -mean * scale if norm.bias is None else norm.bias - mean * scale
        shape = (1, -1, *[1] * (x.dim() - 2))
        return (x * scale.reshape(shape) + shift.reshape(shape)).to(x.dtype)

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, variance and number of all workers' values. Everyone's own travel once and are put
        together by everyone alike, so that replicas keep the same bits."""
        pixels, channels = [0, *range(2, x.dim())], x.shape[1]
        count = x.numel() // channels
        if count:
            variance, mean = torch.var_mean(x, pixels, correction=0)
        else:  # nothing to add, but the others' backward pass counts on this worker
            variance = mean = x.sum(pixels)
        own = torch.cat((mean, variance, mean.new_full((1,), count)))
        rows: Tensor = _Everyones.apply(own, self.circle)  # type: ignore[no-untyped-call]
        means, variances, counts = rows.split((channels, channels, 1), dim=1)
        total = counts.sum().detach()
        share = counts.detach() / total
        mean = (share * means).sum(0)
        variance = (share * (variances + (means - mean).square())).sum(0)
        return mean, variance, total


class _Ghosts:
    """The forward pass of a batch norm that sees a group of images at a time, by torch's own."""

    def __init__(
        self, norm: _BatchNorm, alone: Forward, images: int, cuts: list[tuple[int, int]]
    ) -> None:
        self.norm, self.alone, self.images, self.cuts = norm, alone, images, cuts

    def __call__(self, x: Tensor) -> Tensor:
        norm = self.norm
        if not norm.training:
            return self.alone(x)
        copies, rest = divmod(len(x), self.images)
        if rest:
            raise ValueError(
                f"train.bn = ghost: a batch norm got {len(x)} rows for {self.images} images, so it "
                "cannot tell which are of one image; use local"
            )
        _count(norm)
        parts: dict[tuple[int, int], Tensor] = {}
        means, variances = [], []
        for number, (first, last) in enumerate(self.cuts):
            ranges = [(it * self.images + first, it * self.images + last) for it in range(copies)]
            rows = torch.cat([x[slice(*it)] for it in ranges]) if copies > 1 else x[first:last]
            normal, mean, variance = _normal(norm, rows)
            parts |= {(copy, number): it for copy, it in enumerate(normal.chunk(copies))}
            means.append(mean)
            variances.append(variance)
        self._remember(torch.stack(means), torch.stack(variances))
        return torch.cat([parts[place] for place in sorted(parts)])

    def _remember(self, means: Tensor, variances: Tensor) -> None:
        """As Exchange does with the workers' statistics: the mean of the variances plus the
        variance of the means."""
        sizes = [last - first for first, last in self.cuts]
        share = (means.new_tensor(sizes) / self.images).unsqueeze(1)
        mean = (share * means).sum(0)
        _remember(self.norm, mean, (share * (variances + (means - mean).square())).sum(0))


def _normal(norm: _BatchNorm, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised by itself; with a momentum of 1, what would be remembered is its own mean and
    unbiased variance."""
    kind = torch.promote_types(x.dtype, torch.float32)
    mean, variance = (torch.zeros(x.shape[1], dtype=kind, device=x.device) for _ in range(2))
    weight, bias = (norm.weight, norm.bias) if norm.affine else (None, None)
    normal = functional.batch_norm(x, mean, variance, weight, bias, True, 1.0, norm.eps)
    return normal, mean, variance


def _count(norm: _BatchNorm) -> None:
    """First of all, as torch does: who computes a pass again (recompute) may stop in its midst."""
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)


@torch.no_grad()
def _remember(norm: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    if norm.running_mean is None or norm.running_var is None:
        return
    weight = norm.momentum
    if weight is None:
        assert norm.num_batches_tracked is not None
        weight = 1.0 / float(norm.num_batches_tracked)
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), weight)
    norm.running_var.lerp_(variance.to(norm.running_var.dtype), weight)


class _Everyones(torch.autograd.Function):
    """One row a worker. A row is used by all workers, and its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, circle: Team) -> Tensor:
        ctx.circle = circle
        return circle.gather(own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total: Tensor = _Sum.apply(gradients[0], ctx.circle)  # type: ignore[no-untyped-call]
        return total[ctx.circle.rank], None


class _Sum(torch.autograd.Function):
    """The sum over the workers for all of them, which is its own adjoint; so second derivatives
    (GradAlign) are right as well."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, circle: Team) -> Tensor:
        ctx.circle = circle
        return circle.sum(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total: Tensor = _Sum.apply(gradients[0], ctx.circle)  # type: ignore[no-untyped-call]
        return total, None
