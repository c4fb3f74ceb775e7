"""Steps 7 to 10 of Algorithm A1: the workers' gradients become one.

torch's DistributedDataParallel cuts the gradient into buckets and hands each one over as soon as
the backward pass has filled it; the sum over the workers, quantized or not, runs beside the rest of
the backward.
"""

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from dat.comm.base import BaseExchange
from dat.comm.choice import choose
from dat.comm.message import Slot
from dat.comm.protocols import Default, Protocol
from dat.comm.quantizer import Buckets, Quantizer
from dat.comm.reducer import Reducer
from dat.comm.routes import Memory
from dat.comm.world import World

WHOLE = 1 << 20
"""Megabytes that no gradient has: one bucket."""


class Exchange(BaseExchange):
    """Every worker has the whole model."""

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
        super().__init__(module, world, norms_meet=norms_meet)
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
        self._begun = False
        self._backwards = 0
        self._ddp = _Parallel(
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

    @property
    def memories(self) -> Sequence[Memory]:
        return self.reducer.memories or ()

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Forward and backward passes in here add to the gradient, and nothing is sent."""
        with self._ddp.no_sync():
            yield

    def close(self) -> None:
        """End the threads that exchange; all workers do. The module stays."""
        self.reducer.close()

    def _count(self, bucket: GradBucket) -> None:
        """Where nobody says which step it is, backward passes are counted."""
        if bucket.index() == 0:
            if not self._begun:
                self.reducer.begin(0, self._backwards)
            self._backwards += 1
        if bucket.is_last():
            self._begun = False


class _Parallel(DistributedDataParallel):
    """DDP that can be let go of. Its reducer, if it is the last to have the process group, waits in
    its destructor for gloo's threads and does not let go of the interpreter, which such a thread
    may be waiting for to drop a tensor: both would wait for ever."""

    def __del__(self) -> None:
        group = self.__dict__.get("process_group")  # Python's own reference lets go of it
        for holder in ("logger", "reducer"):
            self.__dict__.pop(holder, None)
        del group


def _sum_bucket(exchange: Exchange, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication hook."""
    exchange._last_bucket = time.perf_counter()
    exchange._count(bucket)
    slots = [exchange._slots[id(parameter)] for parameter in bucket.parameters()]
    return exchange.reducer.sum(bucket.index(), bucket.buffer(), slots)
