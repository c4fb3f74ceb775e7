"""Sums the workers' gradients, bucket by bucket, while the backward pass continues.

On CPUs, each of the two stages of a protocol has a thread, a lane, that processes the buckets in
order. A collective must not be issued from the callback of another one: with two buckets in flight,
the order of the calls could differ between workers, and all of them would wait forever.

On GPUs a stage only enqueues work, so there are no threads: the caller enqueues it on a stream of
its own. So a worker enqueues all of its collectives, those of other process groups included (batch
norms, subgroups), in the order of its program, which is the same for all workers. NCCL needs that:
two collectives that are enqueued in different orders on two workers wait for each other forever.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from dat.core import devices
from dat.core.rng import derive
from dat.distributed.protocols import Protocol
from dat.distributed.quantizers import Quantizer
from dat.distributed.routes import (
    ErrorFeedbackMemory,
    GradientBucket,
    GradientRoute,
    RoundingKeys,
)
from dat.distributed.traffic import Ledger, SentBytes
from dat.distributed.wire_format import Slot
from dat.distributed.world import World


@dataclass
class Job:
    """A bucket in flight."""

    gradient: Tensor
    """The bucket's gradient, which is overwritten with the sum."""
    slots: Sequence[Slot]
    ordered: Sequence[Slot]
    """The same tensors in the order in which they are sent."""
    route: GradientRoute
    keys: RoundingKeys
    done: "Future[Tensor]"
    """Completed with the gradient: on GPUs, waiting for a future synchronizes with the work on the
    tensors in its value, and with nothing else."""
    work: Tensor = field(init=False)
    """The gradient as float32, in the order in which it is sent."""
    error: Exception | None = None

    def copy_in(self) -> None:
        if self._in_place():
            self.work = self.gradient
            return
        self.work = torch.empty(len(self.gradient), device=self.gradient.device)
        for gradient, work in self._views():
            work.copy_(gradient)

    def copy_out(self) -> None:
        if not self._in_place():
            for gradient, work in self._views():
                gradient.copy_(work)

    def result(self, done: "Future[Tensor]") -> Tensor:
        if self.error is not None:
            raise self.error
        return done.value()

    def _in_place(self) -> bool:
        return self.ordered == self.slots and self.gradient.dtype == torch.float32

    def _views(self) -> list[tuple[Tensor, Tensor]]:
        """Each tensor as a view of `gradient` and a view of `work`."""

        def views(flat: Tensor, order: Sequence[Slot]) -> dict[Slot, Tensor]:
            pieces = flat.split([slot.length for slot in order])
            return dict(zip(order, pieces, strict=True))

        work = views(self.work, self.ordered)
        return [(view, work[slot]) for slot, view in views(self.gradient, self.slots).items()]


class Reducer:
    """Sums gradients over the workers; all workers pass the same buckets in the same order."""

    def __init__(
        self,
        quantizer: Quantizer,
        protocol: Protocol,
        world: World,
        *,
        length: int,
        ledger: Ledger,
        seed: int = 0,
    ) -> None:
        protocol.check(quantizer, world.size)
        protocol = protocol.resolve(world)
        self.quantizer, self.protocol, self.world = quantizer, protocol, world
        self.ledger, self.seed = ledger, seed
        self.memories: tuple[ErrorFeedbackMemory, ErrorFeedbackMemory] | None = None
        if quantizer.error_feedback and not quantizer.dense:
            first, second = (ErrorFeedbackMemory(length, world.device) for _ in range(2))
            self.memories = first, second
        self._routes: dict[int, tuple[Sequence[Slot], GradientRoute]] = {}
        self._pipeline: _Lanes | _Enqueuer | None = None
        if protocol.staged:
            enqueued = devices.is_accelerator(world.device)
            self._pipeline = (_Enqueuer if enqueued else _Lanes)(world, ledger)
        self.begin(0, 0)

    def begin(self, epoch: int, step: int) -> None:
        """Start a step; both numbers seed its random rounding."""
        sender = self.protocol.sender(self.world.rank)
        own = derive(self.seed, "quantize", epoch, step, sender)
        self._keys = RoundingKeys(own, derive(self.seed, "quantize again", epoch, step))

    def sum(self, index: int, gradient: Tensor, slots: Sequence[Slot]) -> "Future[Tensor]":
        """Start to sum bucket `index` over the workers, in place; the future returns `gradient`."""
        if self._pipeline is None:
            return self.protocol.sum_bucket(gradient, self.world, self.ledger)
        ordered = sorted(slots, key=lambda slot: slot.position) if self.quantizer.whole else slots
        done: Future[Tensor] = Future(devices=devices.future_devices(self.world.device))
        job = Job(gradient, slots, ordered, self._route(index, ordered), self._keys, done)
        future: Future[Tensor] = done.then(job.result)
        self._pipeline.put(job)
        return future

    def close(self) -> None:
        """Finish the buckets in flight, then destroy the process groups; all workers call it."""
        if self._pipeline is not None:
            self._pipeline.close()
        self._pipeline = None

    def _route(self, index: int, slots: Sequence[Slot]) -> GradientRoute:
        """The cached route of a bucket; a new one if DDP has rebuilt its buckets, as it does after
        the first step."""
        cached = self._routes.get(index)
        if cached is None or cached[0] != slots:
            bucket = GradientBucket(slots, self.quantizer, self.world, self.memories)
            cached = slots, self.protocol.route(bucket)
            self._routes[index] = cached
        return cached[1]


def _collect(job: Job, group: dist.ProcessGroup) -> SentBytes:
    job.copy_in()
    return job.route.collect(job.work, job.keys, group)


def _spread(job: Job, group: dist.ProcessGroup) -> SentBytes:
    sent = job.route.spread(job.work, group)
    job.copy_out()
    return sent


class _Stage:
    """One stage, or both, of a protocol, with a process group of its own. After an error the
    workers are out of step, so later buckets fail too."""

    def __init__(
        self,
        work: Callable[[Job, dist.ProcessGroup], SentBytes],
        world: World,
        ledger: Ledger,
    ) -> None:
        self.group = dist.new_group(timeout=timedelta(seconds=world.timeout))
        self._work, self._ledger = work, ledger
        self._broken: Exception | None = None

    def run(self, job: Job) -> None:
        job.error = job.error or self._broken
        if job.error is None:
            try:
                finish = self._ledger.start_transfer()
                finish(*self._work(job, self.group))
            except Exception as error:
                job.error = error
        self._broken = job.error


class _Enqueuer:
    """Runs both stages in the caller's thread, on a stream of their own."""

    def __init__(self, world: World, ledger: Ledger) -> None:
        self._stage = _Stage(
            lambda job, group: _collect(job, group).plus(_spread(job, group)), world, ledger
        )
        self._stream = devices.new_stream(world.device)
        world.barrier()

    def put(self, job: Job) -> None:
        with devices.side_stream(self._stream):
            self._stage.run(job)
            job.done.set_result(job.gradient)

    def close(self) -> None:
        dist.destroy_process_group(self._stage.group)


class _Lanes:
    """A thread for each stage, so that the second stage of one bucket overlaps with the first one
    of the next."""

    def __init__(self, world: World, ledger: Ledger) -> None:
        second = _Lane(_Stage(_spread, world, ledger), None)
        self._lanes = _Lane(_Stage(_collect, world, ledger), second), second
        # a worker may have created a group before another one has; if it destroyed the group right
        # away, it would break the connections of the other
        world.barrier()

    def put(self, job: Job) -> None:
        self._lanes[0].queue.put(job)

    def close(self) -> None:
        for lane in self._lanes:
            lane.queue.put(None)
            lane.join()
            dist.destroy_process_group(lane.stage.group)


class _Lane(threading.Thread):
    """A thread that runs one stage for each bucket, in order, and passes it to the next lane."""

    def __init__(self, stage: _Stage, next_lane: "_Lane | None") -> None:
        super().__init__(daemon=True)
        self.queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.stage, self._next_lane = stage, next_lane
        self.start()

    def run(self) -> None:
        while (job := self.queue.get()) is not None:
            self.stage.run(job)
            if self._next_lane:
                self._next_lane.queue.put(job)
            else:
                job.done.set_result(job.gradient)
