"""Sums the workers' gradients, bucket by bucket, while the backward pass continues.

Each of the two stages of a protocol has a thread, a lane, that processes the buckets in order. A
collective must not be issued from the callback of another one: with two buckets in flight, the
order of the calls could differ between workers, and all of them would wait forever.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

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
    """Completed with the gradient: on CUDA, waiting for a future synchronizes with the work on the
    tensors in its value, and with nothing else."""
    ready: Any = None
    """On CUDA, an event recorded once the gradient and the buffers of the route are ready."""
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
        protocol = protocol.settle(world)
        self.quantizer, self.protocol, self.world = quantizer, protocol, world
        self.ledger, self.seed = ledger, seed
        self.memories: tuple[ErrorFeedbackMemory, ErrorFeedbackMemory] | None = None
        if quantizer.error_feedback and not quantizer.dense:
            first, second = (ErrorFeedbackMemory(length, world.device) for _ in range(2))
            self.memories = first, second
        self._routes: dict[int, tuple[Sequence[Slot], GradientRoute]] = {}
        self._lanes: list[_Lane] = []
        if protocol.staged:
            self._lanes = self._start_lanes()
        self.begin(0, 0)

    def begin(self, epoch: int, step: int) -> None:
        """Start a step; both numbers seed its random rounding."""
        sender = self.protocol.sender(self.world.rank)
        own = derive(self.seed, "quantize", epoch, step, sender)
        self._keys = RoundingKeys(own, derive(self.seed, "quantize again", epoch, step))

    def sum(self, index: int, gradient: Tensor, slots: Sequence[Slot]) -> "Future[Tensor]":
        """Start to sum bucket `index` over the workers, in place; the future returns `gradient`."""
        if not self.protocol.staged:
            return self.protocol.sum_bucket(gradient, self.world, self.ledger)
        job = self._job(index, gradient, slots)
        future: Future[Tensor] = job.done.then(job.result)
        self._lanes[0].queue.put(job)
        return future

    def close(self) -> None:
        """Finish the buckets in flight, then stop the threads and destroy their process groups; all
        workers call it."""
        for lane in self._lanes:
            lane.queue.put(None)
            lane.join()
            dist.destroy_process_group(lane.group)
        self._lanes = []

    def _job(self, index: int, gradient: Tensor, slots: Sequence[Slot]) -> Job:
        cuda = self.world.device.type == "cuda"
        devices: list[int | str | torch.device] = [self.world.device] if cuda else []
        ordered = sorted(slots, key=lambda slot: slot.position) if self.quantizer.whole else slots
        route = self._route(index, ordered)
        job = Job(gradient, slots, ordered, route, self._keys, Future(devices=devices))
        job.ready = torch.cuda.current_stream().record_event() if cuda else None
        return job

    def _route(self, index: int, slots: Sequence[Slot]) -> GradientRoute:
        """The cached route of a bucket; a new one if DDP has rebuilt its buckets, as it does after
        the first step."""
        cached = self._routes.get(index)
        if cached is None or cached[0] != slots:
            bucket = GradientBucket(slots, self.quantizer, self.world, self.memories)
            cached = slots, self.protocol.route(bucket)
            self._routes[index] = cached
        return cached[1]

    def _start_lanes(self) -> "list[_Lane]":
        def collect(job: Job, group: dist.ProcessGroup) -> SentBytes:
            job.copy_in()
            return job.route.collect(job.work, job.keys, group)

        def spread(job: Job, group: dist.ProcessGroup) -> SentBytes:
            sent = job.route.spread(job.work, group)
            job.copy_out()
            return sent

        def both(job: Job, group: dist.ProcessGroup) -> SentBytes:
            return collect(job, group).plus(spread(job, group))

        # on CUDA collectives are only enqueued: the kernels of two lanes could wait for each other
        # in a different order on each worker and deadlock, so there is one lane
        stages = [both] if self.world.device.type == "cuda" else [collect, spread]
        lanes: list[_Lane] = []
        for stage in reversed(stages):
            lanes.insert(0, _Lane(stage, self.world, self.ledger, lanes[0] if lanes else None))
        # a worker may have created a group before another one has; if it destroyed the group right
        # away, it would break the connections of the other
        self.world.barrier()
        return lanes


class _Lane(threading.Thread):
    """A thread that runs one stage for each bucket, in order, with a process group of its own. It
    passes the buckets to the next lane."""

    def __init__(
        self,
        stage: Callable[[Job, dist.ProcessGroup], SentBytes],
        world: World,
        ledger: Ledger,
        next_lane: "_Lane | None",
    ) -> None:
        super().__init__(daemon=True)
        self.queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.group = dist.new_group(timeout=timedelta(seconds=world.timeout))
        self._stage, self._world, self._ledger = stage, world, ledger
        self._next_lane = next_lane
        self._broken: Exception | None = None
        self.start()

    def run(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.set_device(self._world.device)
            with torch.cuda.stream(torch.cuda.Stream()):
                self._serve()
        else:
            self._serve()

    def _serve(self) -> None:
        while (job := self.queue.get()) is not None:
            self._handle(job)
            if self._next_lane:
                self._next_lane.queue.put(job)
            else:
                job.done.set_result(job.gradient)

    def _handle(self, job: Job) -> None:
        """Run the stage. After an error the workers are out of step, so later buckets fail too."""
        job.error = job.error or self._broken
        if job.error is None:
            try:
                if job.ready is not None:
                    job.ready.wait()
                finish = self._ledger.start_transfer()
                finish(*self._stage(job, self.group))
            except Exception as error:
                job.error = error
        self._broken = job.error
