"""The sum of the workers' gradients, bucket by bucket, while the backward pass goes on.

Two threads, one for each stage of a protocol, take the buckets in the order in which they come. A
collective must not be called from a callback of another: as soon as two buckets are under way, the
order of the calls would differ from worker to worker, and all of them would wait for ever.
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

from dat.comm.ledger import Ledger, Load
from dat.comm.message import Slot
from dat.comm.protocols import Dense, Protocol
from dat.comm.quantizer import Quantizer
from dat.comm.routes import Bucket, Keys, Memory, Route, around
from dat.comm.world import World
from dat.rng import derive


@dataclass
class Job:
    """A bucket under way."""

    gradient: Tensor
    """Where it came from and where the sum goes."""
    slots: Sequence[Slot]
    ordered: Sequence[Slot]
    """The same tensors in the order in which they travel."""
    route: Route
    keys: Keys
    done: "Future[None]"
    ready: Any = None
    """On CUDA: recorded when the gradient was complete and the route's buffers were made."""
    work: Tensor = field(init=False)
    """The gradient as float32, in the order in which it travels."""
    error: Exception | None = None

    def fetch(self) -> None:
        if self._as_it_is():
            self.work = self.gradient
            return
        self.work = torch.empty(len(self.gradient), device=self.gradient.device)
        for there, here in self._pieces():
            here.copy_(there)

    def bring_back(self) -> None:
        if not self._as_it_is():
            for there, here in self._pieces():
                there.copy_(here)

    def result(self, done: "Future[None]") -> Tensor:
        if self.error is not None:
            raise self.error
        return self.gradient

    def _as_it_is(self) -> bool:
        return self.ordered == self.slots and self.gradient.dtype == torch.float32

    def _pieces(self) -> list[tuple[Tensor, Tensor]]:
        """Every tensor, in the gradient and in what travels."""

        def views(flat: Tensor, order: Sequence[Slot]) -> dict[Slot, Tensor]:
            cut = flat.split([slot.length for slot in order])
            return dict(zip(order, cut, strict=True))

        here = views(self.work, self.ordered)
        return [(view, here[slot]) for slot, view in views(self.gradient, self.slots).items()]


class Reducer:
    """Sums gradients over the workers by a protocol; all workers hand over the same buckets."""

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
        self.memories: tuple[Memory, Memory] | None = None
        if quantizer.error_feedback and not quantizer.dense:
            self.memories = Memory(length, world.device), Memory(length, world.device)
        self._routes: dict[int, tuple[Sequence[Slot], Route]] = {}
        self._lanes: list[_Lane] = []
        if not isinstance(protocol, Dense):
            self._lanes = self._start_lanes()
        self.begin(0, 0)

    def begin(self, epoch: int, step: int) -> None:
        """A new step, with random numbers of its own."""
        sender = self.protocol.sender(self.world.rank)
        own = derive(self.seed, "quantize", epoch, step, sender)
        self._keys = Keys(own, derive(self.seed, "quantize again", epoch, step))

    def sum(self, index: int, gradient: Tensor, slots: Sequence[Slot]) -> "Future[Tensor]":
        """Begin to turn bucket number `index` into its sum; the future gives the same tensor."""
        if isinstance(self.protocol, Dense):
            return self._sum_dense(gradient)
        job = self._job(index, gradient, slots)
        future: Future[Tensor] = job.done.then(job.result)
        self._lanes[0].queue.put(job)
        return future

    def close(self) -> None:
        """End the threads, after what is under way, and the process groups; all workers do."""
        for lane in self._lanes:
            lane.queue.put(None)
            lane.join()
            dist.destroy_process_group(lane.group)
        self._lanes = []

    def _sum_dense(self, gradient: Tensor) -> "Future[Tensor]":
        land, load = self.ledger.open_flight(), around(gradient, self.world)
        work = dist.all_reduce(gradient, async_op=True)

        def finish(summed: "Future[Any]") -> Tensor:
            total: Tensor = summed.value()[0]  # raises what the exchange failed with
            land(*load)
            return total

        future: Future[Tensor] = work.get_future().then(finish)
        return future

    def _job(self, index: int, gradient: Tensor, slots: Sequence[Slot]) -> Job:
        cuda = self.world.device.type == "cuda"
        devices: list[int | str | torch.device] = [self.world.device] if cuda else []
        ordered = sorted(slots, key=lambda slot: slot.position) if self.quantizer.whole else slots
        route = self._route(index, ordered)
        job = Job(gradient, slots, ordered, route, self._keys, Future(devices=devices))
        job.ready = torch.cuda.current_stream().record_event() if cuda else None
        return job

    def _route(self, index: int, slots: Sequence[Slot]) -> Route:
        """DDP cuts the gradient anew after the first step; then a bucket gets a new route."""
        found = self._routes.get(index)
        if found is None or found[0] != slots:
            bucket = Bucket(slots, self.quantizer, self.world, self.memories)
            found = slots, self.protocol.route(bucket)
            self._routes[index] = found
        return found[1]

    def _start_lanes(self) -> "list[_Lane]":
        def collect(job: Job, group: dist.ProcessGroup) -> Load:
            job.fetch()
            return job.route.collect(job.work, job.keys, group)

        def spread(job: Job, group: dist.ProcessGroup) -> Load:
            sent = job.route.spread(job.work, group)
            job.bring_back()
            return sent

        def both(job: Job, group: dist.ProcessGroup) -> Load:
            return collect(job, group).plus(spread(job, group))

        # on CUDA a collective is only enqueued; two lanes whose kernels wait for each other's in
        # another order at another worker could block for ever, so there is one
        stages = [both] if self.world.device.type == "cuda" else [collect, spread]
        lanes: list[_Lane] = []
        for stage in reversed(stages):
            lanes.insert(0, _Lane(stage, self.world, self.ledger, lanes[0] if lanes else None))
        return lanes


class _Lane(threading.Thread):
    """One stage: a thread that takes the buckets in order, with a process group of its own."""

    def __init__(
        self,
        stage: Callable[[Job, dist.ProcessGroup], Load],
        world: World,
        ledger: Ledger,
        following: "_Lane | None",
    ) -> None:
        super().__init__(daemon=True)
        self.queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.group = dist.new_group(timeout=timedelta(seconds=world.timeout))
        self._stage, self._world, self._ledger = stage, world, ledger
        self._following = following
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
            if self._following:
                self._following.queue.put(job)
            else:
                job.done.set_result(None)

    def _handle(self, job: Job) -> None:
        """After a failure the workers are no longer in step, so nothing more is exchanged."""
        job.error = job.error or self._broken
        if job.error is None:
            try:
                if job.ready is not None:
                    job.ready.wait()
                land = self._ledger.open_flight()
                land(*self._stage(job, self.group))
            except Exception as error:
                job.error = error
        self._broken = job.error
