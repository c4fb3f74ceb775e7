"""Steps 7 to 10 of Algorithm A1: the workers' gradients become one.

torch's DistributedDataParallel cuts the gradient into buckets and hands each one over as soon as
the backward pass has filled it; the sum over the workers, quantized or not, runs beside the rest of
the backward.
"""

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parallel import DistributedDataParallel

from dat.comm.choice import choose
from dat.comm.ledger import Ledger
from dat.comm.message import Slot
from dat.comm.protocols import Default, Protocol
from dat.comm.quantizer import Buckets, Quantizer
from dat.comm.reducer import Reducer
from dat.comm.routes import to_all_others
from dat.comm.world import World
from dat.stages import staged

WHOLE = 1 << 20
"""Megabytes that no gradient has: one bucket."""


class Exchange:
    """A model whose gradients are summed over the workers during `backward`.

    Summed, not averaged: a worker divides its loss by the *global* batch, so that the sum is the
    gradient of the mean whatever the number of workers and however the batch divides among them.
    """

    def __init__(
        self,
        module: nn.Module,
        world: World,
        *,
        quantizer: Quantizer | None = None,
        protocol: Protocol | None = None,
        seed: int = 0,
        norms_meet: bool = False,
    ) -> None:
        """Where batch `norms_meet` in the forward pass, all workers have remembered the same."""
        self.module = module
        self.world = world
        self.ledger = Ledger(world.device)
        self._slots: dict[int, Slot] = {}
        length = 0
        for parameter in module.parameters():
            if parameter.requires_grad:
                self._slots[id(parameter)] = Slot(tuple(parameter.shape), length)
                length += parameter.numel()
        kinds = {p.dtype for p in module.parameters() if p.requires_grad}
        if quantizer is not None and quantizer.whole and len(kinds) > 1:
            raise ValueError(
                f"quantizer vector: takes one gradient of one type, not {len(kinds)}; use bucket"
            )
        quantizer, protocol = choose(quantizer or Buckets(), protocol or Default(), world, length)
        self.reducer = Reducer(
            quantizer, protocol, world, length=length, ledger=self.ledger, seed=seed
        )
        self._last_bucket = 0.0
        self._begun = False
        self._backwards = 0
        self._norms = [
            norm
            for norm in module.modules()
            if isinstance(norm, _NormBase) and norm.running_mean is not None
            if not (norms_meet and isinstance(norm, _BatchNorm))
        ]
        statistics = ((norm.running_mean, norm.running_var) for norm in self._norms)
        self._statistics = [buffer for pair in statistics for buffer in pair if buffer is not None]
        self._ddp = DistributedDataParallel(
            module,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            forward_sync_buffers=False,  # statistics are averaged in `share`, not overwritten
            gradient_as_bucket_view=True,
            bucket_cap_mb=WHOLE if quantizer.whole else None,
        )
        # DDP keeps what it is given where the garbage collector cannot see the circle
        self._ddp.register_comm_hook(weakref.proxy(self), _sum_bucket)

    def __call__(self, x: Tensor) -> Tensor:
        logits: Tensor = self._ddp(x)
        return logits

    def begin(self, epoch: int, step: int) -> None:
        """A new step, before its backward pass: its random numbers follow from both."""
        self.reducer.begin(epoch, step)
        self._begun = True

    def forget(self) -> None:
        """Drop what rounding left over (error feedback): it belongs to weights that are gone."""
        for memory in self.reducer.memories or ():
            memory.left.zero_()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """An exchange that the updates' error feedback knows nothing of."""
        memories = self.reducer.memories or ()
        kept = [memory.left.clone() for memory in memories]
        self.forget()
        yield
        for memory, left in zip(memories, kept, strict=True):
            memory.left.copy_(left)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Forward and backward passes in here add to the gradient, and nothing is sent."""
        with self._ddp.no_sync():
            yield

    def close(self) -> None:
        """End the threads that exchange; all workers do. The module stays."""
        self.reducer.close()

    def share(self, notes: Tensor) -> Callable[[], Tensor]:
        """Begin to tell all workers this worker's `notes` (a few numbers) after a forward pass.

        The running statistics of batch normalisation travel along and are averaged, so that
        replicas stay identical. What is returned waits, after the backward pass, and gives one row
        a worker.
        """
        parts = [notes.detach().float(), *(buffer.flatten() for buffer in self._statistics)]
        mine = torch.cat(parts)
        rows = mine.new_empty((self.world.size, len(mine)))
        land = self.ledger.open_flight()
        work = dist.all_gather(list(rows.unbind()), mine, async_op=True)

        def arrive(gathered: torch.futures.Future[Any]) -> Tensor:
            gathered.value()  # raises what the exchange failed with
            land(*to_all_others(mine, self.world))
            return rows

        arrived = work.get_future().then(arrive)

        @staged("exchange")
        def settle() -> Tensor:
            self.ledger.expose(time.perf_counter() - self._last_bucket)
            arrived.wait()
            self._average_statistics(rows[:, len(notes) :])
            return rows[:, : len(notes)].cpu()

        return settle

    def _count(self, bucket: GradBucket) -> None:
        """Where nobody says which step it is, backward passes are counted."""
        if bucket.index() == 0:
            if not self._begun:
                self.reducer.begin(0, self._backwards)
            self._backwards += 1
        if bucket.is_last():
            self._begun = False

    @torch.no_grad()
    def _average_statistics(self, rows: Tensor) -> None:
        """Make the running statistics those of all workers' shares together.

        The variance of the union is the mean of the variances plus the variance of the means. The
        running means differ between workers only by momentum * (mean of the share), as all started
        from the same; so their variance counts 1 / momentum-fold.
        """
        columns = iter(rows.split([buffer.numel() for buffer in self._statistics], dim=1))
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


def _sum_bucket(exchange: Exchange, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication hook."""
    exchange._last_bucket = time.perf_counter()
    exchange._count(bucket)
    slots = [exchange._slots[id(parameter)] for parameter in bucket.parameters()]
    return exchange.reducer.sum(bucket.index(), bucket.buffer(), slots)
