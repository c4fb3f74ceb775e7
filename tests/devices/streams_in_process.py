"""What `test_streams.py` checks in processes that have the traced device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dat.attacks import PGD
from dat.core import devices
from dat.data import ImageData
from dat.data.batches import Batches, RawBatch
from dat.data.loader import Loader
from dat.distributed import CONCRETE_PROTOCOLS, Exchange, Ledger, Reducer, World, reducer
from dat.distributed.scatter import AllGather
from dat.distributed.traffic import EventClock
from dat.objectives import OBJECTIVES
from dat.train import checkpoint
from dat.train.checkpointer import Checkpointer
from dat.train.timing import StepTimer
from tests.devices.echo_group import echo_world
from tests.devices.traced import TracedDevice, build
from tests.distributed.cases import slots_of
from tests.distributed.in_workers import QUANTIZERS, cases
from tests.trainers import make_trainer

WORKERS = 4
SLOTS = slots_of((40, 30), (7,), (513,))
LENGTH = sum(slot.length for slot in SLOTS)
KERNEL = 1e-3
"""Seconds that a kernel takes on the clock of the device."""


def run(check: str, *details: Any) -> None:
    """Load the device into this process, and run a check."""
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    globals()[check](TracedDevice(build()), *details)


@contextmanager
def joined(traced: TracedDevice, rank: int = 1) -> Iterator[World]:
    """One of four workers, on two nodes."""
    with echo_world(rank, WORKERS, ("cpu", "traced")):
        world = World(rank, WORKERS, traced.device, "echo", False)
        yield replace(world, local_rank=rank % 2, local_size=2)


def model(traced: TracedDevice) -> nn.Module:
    """Two batch norms, so that one of them is between buckets of the gradient."""
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU()),
        *(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()),
        nn.Linear(8, 3),
    ).to(traced.device)


def images(count: int) -> ImageData:
    return ImageData.of(torch.rand(count, 3, 2, 2), torch.arange(count) % 3)


def protocol(name: str) -> Any:
    return CONCRETE_PROTOCOLS[name](**({"inside": 2} if name == "hybrid" else {}))


# The reducer


def sum_two_buckets(world: World, name: str, quantizer: str) -> None:
    """The backward pass writes the first bucket and goes on to the second while the first is
    summed; then the optimizer reads both."""
    ledger = Ledger(world.device)
    sums = Reducer(QUANTIZERS[quantizer], protocol(name), world, length=LENGTH, ledger=ledger)
    for _ in range(2):
        gradients = [torch.empty(LENGTH, device=world.device) for _ in range(2)]
        futures = []
        for number, gradient in enumerate(gradients):
            gradient.normal_()
            futures.append(sums.sum(number, gradient, SLOTS))
        for future in futures:
            future.wait()
        for gradient in gradients:
            gradient.mul_(0.5)
    sums.close()


def every_protocol_is_ordered(traced: TracedDevice) -> None:
    for rank in range(2):
        with joined(traced, rank) as world:
            for name, quantizer in cases():
                with traced.no_races():
                    sum_two_buckets(world, name, quantizer)


def a_future_of_none_is_a_race(traced: TracedDevice) -> None:
    def put(self: Any, job: Any) -> None:
        with devices.side_stream(self._stream):
            self._stage.run(job)
            job.done.set_result(None)

    with patch.object(reducer._Enqueuer, "put", put):
        expect_race_in_staged_protocols(traced, "aten::mul on stream 0 writes what")


def a_side_stream_that_does_not_wait_is_a_race(traced: TracedDevice) -> None:
    with patch.object(devices, "side_stream", lambda stream: stream):
        expect_race_in_staged_protocols(traced, "what aten::normal_ on stream 0 writes")


def expect_race_in_staged_protocols(traced: TracedDevice, words: str) -> None:
    with joined(traced) as world:
        for name, quantizer in cases():
            if CONCRETE_PROTOCOLS[name].staged:
                sum_two_buckets(world, name, quantizer)
                races = traced.races()
                assert any(words in race for race in races), (name, quantizer, races)


def memory_is_not_used_again_too_early(traced: TracedDevice) -> None:
    """The detector itself: a block is freed while another stream reads it."""
    side = torch.Stream(traced.device)
    for told in (False, True):
        values = torch.ones(5, device=traced.device)
        side.wait_stream(torch.accelerator.current_stream(traced.device))
        with side:
            values.sum()
        if told:
            values.record_stream(side)
        del values
        races = traced.races()
        assert bool(races) != told, races
        assert told or "freed while aten::sum" in races[0]


# Whole runs


def training_is_ordered(traced: TracedDevice, root: Path, settings: dict[str, Any]) -> None:
    """Two epochs: attacks, exchanges, statistics, evaluation and checkpoints."""
    given = dict(settings)
    if "protocol" in given:
        given["protocol"] = protocol(given["protocol"])
    if "quantizer" in given:
        given["quantizer"] = QUANTIZERS[given["quantizer"]]
    if "objective" in given:
        given["objective"] = OBJECTIVES[given["objective"]]()
    with joined(traced) as world, patch.object(checkpoint, "_wait_for_workers"):
        trainer = make_trainer(
            model=model(traced),
            data=images(48),
            holdout=images(12),
            world=world,
            epochs=2,
            batch=24,
            attack=PGD(steps=2),
            callbacks=[Checkpointer(root, every=1)],
            **given,
        )
        with traced.no_races():
            records = trainer.fit()
        assert len(records) == 2
        assert all(record.comm_seconds > 0 for record in records)


def backward_through_ddp_is_ordered(traced: TracedDevice, planted: bool) -> None:
    """What DDP itself does with the future: the planted fault leaves it without the gradient."""

    def put(self: Any, job: Any) -> None:
        with devices.side_stream(self._stream):
            self._stage.run(job)
            job.done.set_result(None)

    def result(job: Any, done: Any) -> Any:
        return job.gradient

    plant = patch.object(reducer._Enqueuer, "put", put if planted else reducer._Enqueuer.put)
    give = patch.object(reducer.Job, "result", result if planted else reducer.Job.result)
    with joined(traced) as world, plant, give:
        module = model(traced)
        exchange = Exchange(
            module, world, quantizer=QUANTIZERS["bucket 8"], protocol=protocol("chunked")
        )
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for _ in range(2):
            exchange(torch.rand(6, 3, 2, 2).to(traced.device)).square().mean().backward()
            optimizer.step()
        exchange.close()
        assert bool(traced.races()) == planted


# The host and the device


def batches_stay_until_they_are_copied(traced: TracedDevice, reuse: bool) -> None:
    """Copies from page-locked memory run behind the host. Each batch has memory of its own, which
    torch does not use again before the copy has ended. A loader that fills the same buffer again is
    the planted fault."""
    buffers: list[RawBatch] = []

    def read(number: int) -> RawBatch:
        if not buffers or not reuse:
            values = torch.full((6, 3, 2, 2), float(number)), torch.zeros(6, dtype=torch.int64)
            weights = torch.arange(6), torch.ones(6)
            buffers[:] = [RawBatch(*(tensor.pin_memory() for tensor in (*values, *weights)))]
        traced.host_writes(buffers[0].x)
        return buffers[0]

    batches = Batches(sources=[], steps=100)
    batches._loader.append(Loader(read))
    for step in (0, 1, 1, 2, 3):  # free AT repeats a batch
        batch = batches.draw(0, step, traced.device)
        batch.x.mul_(2.0)
    races = traced.races()
    assert bool(races) == reuse, races
    assert not reuse or "the host on thread 1 writes what copy on stream 0 reads" in races[0]


def checkpoints_are_copied_before_they_are_written(traced: TracedDevice, planted: bool) -> None:
    """The writer's thread reads what `copy_to_cpu` returns. The planted fault copies behind the
    host's back."""

    def behind(tensors: checkpoint.Tensors) -> checkpoint.Tensors:
        return {name: value.to("cpu", non_blocking=True) for name, value in tensors.items()}

    copy = behind if planted else checkpoint.copy_to_cpu
    values = torch.zeros(100, device=traced.device)
    for step in range(3):
        values.add_(1.0)
        copies = copy({"values": values})

        def write(copied: Tensor = copies["values"], step: int = step) -> None:
            traced.host_reads(copied)
            assert copied.eq(step + 1).all()

        writer = threading.Thread(target=write)
        writer.start()
        values.mul_(1.0)  # training continues
        writer.join()
    races = traced.races()
    assert bool(races) == planted, races
    assert not planted or "the host on thread" in races[0]


# Time


def times_are_those_of_the_stream(traced: TracedDevice) -> None:
    """A timer counts the kernels of the stream on which it is entered, and reads after waiting."""
    values, timer = torch.zeros(5, device=traced.device), StepTimer(traced.device)
    with timer("attack"):
        for _ in range(3):
            values.add_(1.0)
    side = devices.new_stream(traced.device)
    with devices.side_stream(side), timer("optimizer"):
        values.add_(1.0)
    assert timer.read() == pytest.approx({"attack": 3 * KERNEL, "update": KERNEL})
    assert timer.read() == {"attack": 0.0, "update": 0.0}


def events_are_read_after_waiting(traced: TracedDevice) -> None:
    """Planted: a clock that does not wait. The device refuses, as CUDA does."""
    clock, values = EventClock(traced.device), torch.zeros(5, device=traced.device)
    start = clock.mark()
    values.add_(1.0)
    end: Any = clock.mark()
    origin: Any = clock._origin
    with pytest.raises(RuntimeError, match="must be completed"):
        origin.elapsed_time(end)
    first_two = KERNEL, 2 * KERNEL  # the first one is that of `zeros`
    assert clock.seconds(start, end) == pytest.approx(first_two)


def transfers_end_with_their_collective(traced: TracedDevice) -> None:
    """Statistics and weights that are gathered asynchronously: their time is that of the kernel,
    however much the caller's stream does before it waits."""
    with joined(traced) as world:
        exchange = Exchange(model(traced), world)
        exchange.ledger.read_and_reset()
        values = torch.zeros(5, device=traced.device)
        receive = exchange.all_gather_stats(values)
        for _ in range(20):
            values.add_(1.0)
        receive()
        gathered = exchange.ledger.read_and_reset()
        assert gathered.busy == pytest.approx(WORKERS * KERNEL), gathered  # a copy for each row

        ledger = Ledger(traced.device)
        gather = AllGather(ledger, crosses_nodes=True)
        for asynchronous in (False, True):
            out = torch.empty(WORKERS * 5, device=traced.device)
            group = dist.group.WORLD
            assert group is not None
            work = gather(out, values, group, asynchronous)
            assert (work is not None) == asynchronous
            for _ in range(20):
                values.clone()
            if work is not None:
                work.wait()
            out.add_(1.0)
            counted = ledger.read_and_reset()
            assert counted.busy == pytest.approx(KERNEL), (asynchronous, counted)
            assert counted.sent == (WORKERS - 1) * values.nbytes == counted.inter_node
        exchange.close()
    assert not traced.races()
