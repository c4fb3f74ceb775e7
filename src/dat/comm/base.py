"""What every exchange of gradients has in common: notes, batch statistics, and the ledger."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from dat.comm.ledger import Ledger
from dat.comm.routes import Memory, to_all_others
from dat.comm.world import World
from dat.stages import staged


class BaseExchange(ABC):
    """A model whose gradients are summed over the workers during `backward`.

    Summed, not averaged: a worker divides its loss by the *global* batch, so that the sum is the
    gradient of the mean whatever the number of workers and however the batch divides among them.
    """

    def __init__(self, module: nn.Module, world: World, *, norms_meet: bool = False) -> None:
        """Where batch `norms_meet` in the forward pass, all workers have remembered the same."""
        self.module = module
        self.world = world
        self.ledger = Ledger(world.device)
        self._last_bucket = 0.0
        self._norms = [
            norm
            for norm in module.modules()
            if isinstance(norm, _NormBase) and norm.running_mean is not None
            if not (norms_meet and isinstance(norm, _BatchNorm))
        ]

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """The logits; a backward pass from here sums the gradients."""

    @abstractmethod
    def begin(self, epoch: int, step: int) -> None:
        """A new step, before its backward pass: its random numbers follow from both."""

    @property
    def memories(self) -> Sequence[Memory]:
        """Error feedback: what rounding left over."""
        return ()

    def forget(self) -> None:
        """Drop what rounding left over (error feedback): it belongs to weights that are gone."""
        for memory in self.memories:
            memory.left.zero_()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """An exchange that the updates' error feedback knows nothing of."""
        kept = [memory.left.clone() for memory in self.memories]
        self.forget()
        yield
        for memory, left in zip(self.memories, kept, strict=True):
            memory.left.copy_(left)

    @abstractmethod
    def silent(self) -> Any:
        """Forward and backward passes in here add to the gradient, and nothing is sent."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """For many passes with the same weights, as an attack makes them."""
        yield

    @abstractmethod
    def close(self) -> None:
        """End what exchanges; all workers do. The module stays."""

    def norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """The L2 norm of each whole tensor, the same at every worker."""
        return torch.stack(torch._foreach_norm(list(tensors)))

    def share(self, notes: Tensor) -> Callable[[], Tensor]:
        """Begin to tell all workers this worker's `notes` (a few numbers) after a forward pass.

        The running statistics of batch normalisation travel along and are averaged, so that
        replicas stay identical. What is returned waits, after the backward pass, and gives one row
        a worker.
        """
        statistics = self._statistics()
        parts = [notes.detach().float(), *(buffer.flatten() for buffer in statistics)]
        mine = torch.cat(parts)
        rows = mine.new_empty((self.world.size, len(mine)))
        land, load = self.ledger.open_flight(), to_all_others(mine, self.world)
        work = dist.all_gather(list(rows.unbind()), mine, async_op=True)

        def arrive(gathered: torch.futures.Future[Any]) -> Tensor:
            # gloo's thread is the last to have this, so it knows no exchange: that one's process
            # group would end in a thread of its own
            gathered.value()  # raises what the exchange failed with
            land(*load)
            return rows

        arrived = work.get_future().then(arrive)

        @staged("exchange")
        def settle() -> Tensor:
            self.ledger.expose(time.perf_counter() - self._last_bucket)
            arrived.wait()
            self._average_statistics(rows[:, len(notes) :])
            return rows[:, : len(notes)].cpu()

        return settle

    def _statistics(self) -> list[Tensor]:
        pairs = ((norm.running_mean, norm.running_var) for norm in self._norms)
        return [buffer for pair in pairs for buffer in pair if buffer is not None]

    @torch.no_grad()
    def _average_statistics(self, rows: Tensor) -> None:
        """Make the running statistics those of all workers' shares together.

        The variance of the union is the mean of the variances plus the variance of the means. The
        running means differ between workers only by momentum * (mean of the share), as all started
        from the same; so their variance counts 1 / momentum-fold.
        """
        columns = iter(rows.split([buffer.numel() for buffer in self._statistics()], dim=1))
        for norm in self._norms:
            means, variances = next(columns), next(columns)
            if not norm.training:  # nobody has changed them; a mean of equals may round
                continue
            assert norm.running_mean is not None and norm.running_var is not None
            between = means.var(0, correction=0) / _momentum(norm)
            norm.running_mean.copy_(means.mean(0))
            norm.running_var.copy_(variances.mean(0) + between)


def _momentum(norm: _NormBase) -> float:
    """The share that the last batch has in the running statistics."""
    if norm.momentum is not None:
        return norm.momentum or 1.0
    assert norm.num_batches_tracked is not None
    return 1.0 / max(int(norm.num_batches_tracked), 1)
