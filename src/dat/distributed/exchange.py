"""Steps 7 to 10 of Algorithm A1: the gradients of the workers are summed.

torch's DistributedDataParallel divides the gradient into buckets and passes each one on as soon as
the backward pass has filled it. The sum over the workers, quantized or not, overlaps with the rest
of the backward pass.
"""

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from dat.core import devices
from dat.distributed.base import BaseExchange
from dat.distributed.choice import choose
from dat.distributed.protocols import Default, Protocol
from dat.distributed.quantizers import Buckets, Quantizer
from dat.distributed.reducer import Reducer
from dat.distributed.routes import ErrorFeedbackMemory
from dat.distributed.wire_format import Slot
from dat.distributed.world import World

SINGLE_BUCKET_MB = 1 << 20
"""A bucket capacity that exceeds any gradient, so that DDP uses one bucket."""


class Exchange(BaseExchange):
    """The gradient exchange of a replicated model: every worker holds all of it."""

    def __init__(
        self,
        module: nn.Module,
        world: World,
        *,
        quantizer: Quantizer | None = None,
        protocol: Protocol | None = None,
        seed: int = 0,
        synchronized_batch_norm: bool = False,
    ) -> None:
        super().__init__(module, world, synchronized_batch_norm=synchronized_batch_norm)
        self._slots: dict[int, Slot] = {}
        length = 0
        for parameter in module.parameters():
            if parameter.requires_grad:
                self._slots[id(parameter)] = Slot(tuple(parameter.shape), length)
                length += parameter.numel()
        dtypes = {p.dtype for p in module.parameters() if p.requires_grad}
        if quantizer is not None and quantizer.whole and len(dtypes) > 1:
            raise ValueError(
                f"quantizer vector: needs gradients of one dtype, not {len(dtypes)}; use bucket"
            )
        quantizer, protocol = choose(quantizer or Buckets(), protocol or Default(), world, length)
        self.reducer = Reducer(
            quantizer, protocol, world, length=length, ledger=self.ledger, seed=seed
        )
        self._step_started = False
        self._backward_passes = 0
        self._ddp = _Parallel(
            module,
            device_ids=[world.device.index] if devices.is_accelerator(world.device) else None,
            forward_sync_buffers=False,  # `share` averages running statistics instead
            gradient_as_bucket_view=True,
            bucket_cap_mb=SINGLE_BUCKET_MB if quantizer.whole else None,
        )
        # a proxy, because the garbage collector cannot see a reference cycle through DDP's C++ side
        self._ddp.register_comm_hook(weakref.proxy(self), _sum_bucket)

    def __call__(self, x: Tensor) -> Tensor:
        logits: Tensor = self._ddp(x)
        return logits

    def begin(self, epoch: int, step: int) -> None:
        """Start a step, before its backward pass; both numbers seed its random rounding."""
        self.reducer.begin(epoch, step)
        self._step_started = True

    @property
    def memories(self) -> Sequence[ErrorFeedbackMemory]:
        return self.reducer.memories or ()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally, without communication."""
        with self._ddp.no_sync():
            yield

    def close(self) -> None:
        """Stop the communication threads; all workers call it. The module stays usable."""
        self.reducer.close()

    def _count_backward(self, bucket: GradBucket) -> None:
        """If the caller does not start steps with `begin`, number the backward passes instead."""
        if bucket.index() == 0:
            if not self._step_started:
                self.reducer.begin(0, self._backward_passes)
            self._backward_passes += 1
        if bucket.is_last():
            self._step_started = False


class _Parallel(DistributedDataParallel):
    """DDP that cannot deadlock when it is destroyed. If its reducer held the last reference to the
    process group, the reducer's destructor would wait for gloo's threads while holding the GIL, and
    such a thread may need the GIL to release a tensor."""

    def __del__(self) -> None:
        group = self.__dict__.get("process_group")  # so that Python releases the last reference
        for holder in ("logger", "reducer"):
            self.__dict__.pop(holder, None)
        del group


def _sum_bucket(exchange: Exchange, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication hook."""
    exchange._last_bucket = time.perf_counter()
    exchange._count_backward(bucket)
    exchange.unscale(bucket.buffer())
    slots = [exchange._slots[id(parameter)] for parameter in bucket.parameters()]
    return exchange.reducer.sum(bucket.index(), bucket.buffer(), slots)
