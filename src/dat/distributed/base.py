"""The base class of gradient exchanges: step statistics, batch-norm statistics, and the ledger."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from dat.core.deprecation import RenamedAttribute
from dat.core.tracing import staged
from dat.distributed.collectives import start_all_gather
from dat.distributed.routes import ErrorFeedbackMemory
from dat.distributed.shards import Shards
from dat.distributed.traffic import Ledger, to_all_others
from dat.distributed.world import World


class BaseExchange(ABC):
    """A model whose gradients are summed over the workers during `backward`.

    Gradients are summed, not averaged: each worker divides its loss by the *global* batch size, so
    that the sum is the gradient of the mean loss, however the batch is divided between workers.
    """

    def __init__(
        self, module: nn.Module, world: World, *, synchronized_batch_norm: bool = False
    ) -> None:
        """With `synchronized_batch_norm`, batch norms are synchronized in the forward pass, and
        their running statistics need no averaging."""
        self.module = module
        self.world = world
        self.ledger = Ledger(world.device)
        self.loss_scale = 1.0
        """What the loss is multiplied by before `backward`, the same on every worker."""
        self._last_bucket = 0.0
        self._batch_norms = [
            norm
            for norm in module.modules()
            if isinstance(norm, _NormBase) and norm.running_mean is not None
            if not (synchronized_batch_norm and isinstance(norm, _BatchNorm))
        ]

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Compute the logits; the backward pass from them sums the gradients."""

    @abstractmethod
    def begin(self, epoch: int, step: int) -> None:
        """Start a step, before its backward pass; both numbers seed its random rounding."""

    @property
    def memories(self) -> Sequence[ErrorFeedbackMemory]:
        """The quantization errors kept for error feedback."""
        return ()

    def reset_error_feedback(self) -> None:
        """Set the quantization errors to zero, e.g. after the weights were replaced."""
        for memory in self.memories:
            memory.residual.zero_()

    @contextmanager
    def without_error_feedback(self) -> Iterator[None]:
        """Exchange gradients that are not an update's: without the error feedback of the updates,
        and without changing it."""
        saved = [memory.residual.clone() for memory in self.memories]
        self.reset_error_feedback()
        yield
        for memory, residual in zip(self.memories, saved, strict=True):
            memory.residual.copy_(residual)

    def unscale(self, gradient: Tensor) -> None:
        """Divide this worker's own gradient by the loss scale, before it is quantized or sent. So
        a change of the scale affects neither step sizes nor error feedback."""
        if self.loss_scale != 1.0:
            gradient.mul_(1.0 / self.loss_scale)

    @abstractmethod
    def no_sync(self) -> Any:
        """Accumulate gradients locally, without communication."""

    @contextmanager
    def keep_gathered(self) -> Iterator[None]:
        """Keep gathered weights between passes with the same weights, as in an attack."""
        yield

    @abstractmethod
    def close(self) -> None:
        """Stop exchanging gradients; all workers call it. The module stays usable."""

    def norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """The L2 norm of each unsharded tensor, the same on every worker."""
        return torch.stack(torch._foreach_norm(list(tensors)))

    # The following methods do something only for a sharded model.

    @property
    def shards(self) -> Shards | None:
        """The workers that hold the shards of one model; `None` if the model is not sharded."""
        return None

    def any_worker(self, flags: Tensor) -> Tensor:
        """Logical or of the flags over the workers that hold shards of this model."""
        return flags

    def shard_copy(self, model: nn.Module) -> nn.Module:
        """A copy of a model like this one; of a sharded model, a copy of this worker's shards."""
        return copy.deepcopy(model)

    def unsharded_model(self, model: nn.Module) -> nn.Module:
        """A model like this one with its full weights; all workers call it."""
        return model

    def all_gather_stats(self, stats: Tensor, weight: int | None = None) -> Callable[[], Tensor]:
        """Start an all-gather of this worker's `stats` (a few numbers), after a forward pass.

        The running statistics of batch normalization are sent along and averaged, so that replicas
        stay identical; `stats[weight]` is each worker's number of images, which weights them. Call
        the returned function after the backward pass: it waits and returns the `stats` of all
        workers, one row per rank.
        """
        buffers = self._running_statistics()
        own = torch.cat([stats.detach().float(), *(buffer.flatten() for buffer in buffers)])
        finish, sent = self.ledger.start_transfer(), to_all_others(own, self.world)
        rows, gather = start_all_gather(own, self.world.size)

        def record(gathered: torch.futures.Future[Any]) -> Tensor:
            # must not refer to `self`: gloo's thread may release this closure last, and would then
            # destroy the exchange's process group in one of the group's own threads
            gathered.value()  # raises the error of a failed collective
            finish(*sent)
            return rows

        recorded = gather.then(record)

        @staged("exchange")
        def receive() -> Tensor:
            self.ledger.add_exposed(time.perf_counter() - self._last_bucket)
            recorded.wait()
            gathered = rows[:, : len(stats)].cpu()
            images = None if weight is None else gathered[:, weight]
            self._average_running_statistics(rows[:, len(stats) :], images)
            return gathered

        return receive

    share = RenamedAttribute("all_gather_stats")

    def _running_statistics(self) -> list[Tensor]:
        pairs = ((norm.running_mean, norm.running_var) for norm in self._batch_norms)
        return [buffer for pair in pairs for buffer in pair if buffer is not None]

    @torch.no_grad()
    def _average_running_statistics(self, rows: Tensor, images: Tensor | None) -> None:
        """Set the running statistics to those of the global batch; `images` is the number of images
        of each worker, equal if not given.

        The variance of the global batch is the mean of the workers' variances plus the variance of
        their means. As all workers started from the same running mean, the running means differ
        only by momentum * (mean of the share), so their variance is multiplied by 1 / momentum.
        """
        columns = iter(rows.split([buffer.numel() for buffer in self._running_statistics()], dim=1))
        for norm in self._batch_norms:
            means, variances = next(columns), next(columns)
            if not norm.training:  # unchanged; a mean of equal values may still round
                continue
            assert norm.running_mean is not None and norm.running_var is not None
            if images is None or images.min() == images.max():
                mean, within = means.mean(0), variances.mean(0)
                between = means.var(0, correction=0)
            else:
                share = (images / images.sum()).to(means.device).unsqueeze(1)
                mean, within = (share * means).sum(0), (share * variances).sum(0)
                between = (share * (means - mean).square()).sum(0)
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(within + between / _momentum(norm))


def _momentum(norm: _NormBase) -> float:
    """The weight of the last batch in the running statistics."""
    if norm.momentum is not None:
        return norm.momentum or 1.0
    assert norm.num_batches_tracked is not None
    return 1.0 / max(int(norm.num_batches_tracked), 1)
