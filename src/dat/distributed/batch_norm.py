"""Which images batch normalization takes its statistics from: this worker's share of the batch,
the shares of several workers, or groups within a share.

torch's SyncBatchNorm does not support CPU tensors. Here the `forward` of a model's batch norms is
patched for one pass, whatever their class. In eval mode they behave as usual.
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

from dat.distributed.subgroup import WorkerSubgroup
from dat.distributed.traffic import Ledger
from dat.distributed.world import World

Forward = Callable[[Tensor], Tensor]


class ScopedBatchNorm:
    """Batch statistics over the images of a subgroup of workers, or over groups of `group` images
    of this worker. A subgroup of one worker without groups leaves torch's batch norm unchanged."""

    def __init__(self, subgroup: WorkerSubgroup, *, group: int | None = None) -> None:
        self.subgroup, self.group = subgroup, group

    @classmethod
    def of(
        cls, scope: str, subgroup: WorkerSubgroup, *, world: World, ledger: Ledger, group: int
    ) -> ScopedBatchNorm:
        """`local`: over the images of the subgroup, which divides the copies of each image; `sync`:
        over the images of all workers; `ghost`: over `group` images of this worker at a time."""
        if scope == "sync" and subgroup.size < world.size:
            return cls(WorkerSubgroup(world, world.size, ledger))
        return cls(subgroup, group=group if scope == "ghost" else None)

    @contextmanager
    def patch(self, model: nn.Module, images: int) -> Iterator[None]:
        """Patch the model's batch norms for passes over a batch of `images` images. An image may
        occur in several rows (clean, attacked, with noise): row r belongs to image r modulo
        `images`."""
        synchronized = self.subgroup.size > 1
        patched = synchronized or (self.group is not None and images > self.group)
        modules = model.modules() if patched else ()
        with ExitStack() as stack:
            for norm in [module for module in modules if isinstance(module, _BatchNorm)]:
                original: Forward = norm.forward
                if synchronized:
                    norm.forward = _Synchronized(norm, original, self.subgroup)  # type: ignore[assignment]
                else:
                    norm.forward = _Ghost(norm, original, images, self._group_bounds(images))  # type: ignore[assignment]
                stack.callback(delattr, norm, "forward")
            yield

    def min_over_subgroup(self, count: int) -> int:
        """The minimum over the subgroup: synchronized batch norms need equally many passes on every
        worker."""
        return self.subgroup.min(count) if self.subgroup.size > 1 else count

    def _group_bounds(self, images: int) -> list[tuple[int, int]]:
        """Groups of at most `group` images, of nearly equal size: with 33 images in groups of 32, a
        last group of one image would have no useful statistics."""
        assert self.group is not None
        groups = -(-images // self.group)
        return list(pairwise(number * images // groups for number in range(groups + 1)))


class _Synchronized:
    """The forward pass of a batch norm over the images of a whole subgroup."""

    def __init__(self, norm: _BatchNorm, original: Forward, subgroup: WorkerSubgroup) -> None:
        self.norm, self.original, self.subgroup = norm, original, subgroup

    def __call__(self, x: Tensor) -> Tensor:
        norm = self.norm
        if not norm.training:
            return self.original(x)
        _count_batch(norm)
        dtype = torch.promote_types(x.dtype, torch.float32)  # half precision cannot hold the sums
        mean, variance, count = self._statistics(x.to(dtype))
        _update_running(norm, mean, variance * (count / (count - 1).clamp_min(1)))
        scale = (variance + norm.eps).rsqrt()
        if norm.affine:
            scale = scale * norm.weight
        shift = -mean * scale if norm.bias is None else norm.bias - mean * scale
        shape = (1, -1, *[1] * (x.dim() - 2))
        return (x * scale.reshape(shape) + shift.reshape(shape)).to(x.dtype)

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, variance and number of the values of all workers. Each worker gathers the local
        statistics of all and combines them in the same way, so that replicas stay identical to the
        bit."""
        pixels, channels = [0, *range(2, x.dim())], x.shape[1]
        count = x.numel() // channels
        if count:
            variance, mean = torch.var_mean(x, pixels, correction=0)
        else:  # no images here, but the collectives in the backward pass need this worker
            variance = mean = x.sum(pixels)
        own = torch.cat((mean, variance, mean.new_full((1,), count)))
        rows: Tensor = _Gather.apply(own, self.subgroup)  # type: ignore[no-untyped-call]
        means, variances, counts = rows.split((channels, channels, 1), dim=1)
        total = counts.sum().detach()
        share = counts.detach() / total
        mean = (share * means).sum(0)
        variance = (share * (variances + (means - mean).square())).sum(0)
        return mean, variance, total


class _Ghost:
    """The forward pass of a batch norm that applies torch's own to one group of images at a
    time."""

    def __init__(
        self, norm: _BatchNorm, original: Forward, images: int, groups: list[tuple[int, int]]
    ) -> None:
        self.norm, self.original, self.images, self.groups = norm, original, images, groups

    def __call__(self, x: Tensor) -> Tensor:
        norm = self.norm
        if not norm.training:
            return self.original(x)
        copies, remainder = divmod(len(x), self.images)
        if remainder:
            raise ValueError(
                f"train.bn = ghost: a batch norm got {len(x)} rows for {self.images} images, so it "
                "cannot assign rows to images; use local"
            )
        _count_batch(norm)
        outputs: dict[tuple[int, int], Tensor] = {}
        means, variances = [], []
        for group, (first, last) in enumerate(self.groups):
            starts = range(0, copies * self.images, self.images)
            slices = [x[start + first : start + last] for start in starts]
            rows = torch.cat(slices) if copies > 1 else slices[0]
            normalized, mean, variance = _normalize(norm, rows)
            outputs |= {(copy, group): part for copy, part in enumerate(normalized.chunk(copies))}
            means.append(mean)
            variances.append(variance)
        self._update_running(torch.stack(means), torch.stack(variances))
        return torch.cat([outputs[key] for key in sorted(outputs)])

    def _update_running(self, means: Tensor, variances: Tensor) -> None:
        """The variance is the mean of the variances plus the variance of the means, as in
        `BaseExchange`."""
        sizes = [last - first for first, last in self.groups]
        share = (means.new_tensor(sizes) / self.images).unsqueeze(1)
        mean = (share * means).sum(0)
        _update_running(self.norm, mean, (share * (variances + (means - mean).square())).sum(0))


def _normalize(norm: _BatchNorm, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The normalized values, their mean and their unbiased variance: with a momentum of 1, torch
    returns these as the running statistics."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    mean, variance = (torch.zeros(x.shape[1], dtype=dtype, device=x.device) for _ in range(2))
    weight, bias = (norm.weight, norm.bias) if norm.affine else (None, None)
    normalized = functional.batch_norm(x, mean, variance, weight, bias, True, 1.0, norm.eps)
    return normalized, mean, variance


def _count_batch(norm: _BatchNorm) -> None:
    """Comes first, as in torch: activation checkpointing may stop a recomputed pass halfway."""
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)


@torch.no_grad()
def _update_running(norm: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    if norm.running_mean is None or norm.running_var is None:
        return
    weight = norm.momentum
    if weight is None:
        assert norm.num_batches_tracked is not None
        weight = 1.0 / float(norm.num_batches_tracked)
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), weight)
    norm.running_var.lerp_(variance.to(norm.running_var.dtype), weight)


class _Gather(torch.autograd.Function):
    """All-gather, one row per worker. All workers use a row, so its gradient is the sum of
    theirs."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, subgroup: WorkerSubgroup) -> Tensor:
        ctx.subgroup = subgroup
        return subgroup.gather(own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total: Tensor = _Sum.apply(gradients[0], ctx.subgroup)  # type: ignore[no-untyped-call]
        return total[ctx.subgroup.rank], None


class _Sum(torch.autograd.Function):
    """All-reduce, which is its own adjoint: so second derivatives (GradAlign) are right as
    well."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, subgroup: WorkerSubgroup) -> Tensor:
        ctx.subgroup = subgroup
        return subgroup.sum(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total: Tensor = _Sum.apply(gradients[0], ctx.subgroup)  # type: ignore[no-untyped-call]
        return total, None
