"""How long messages and sums take between these workers, alone: what a plan is calibrated by."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from dat.comm.ledger import Ledger
from dat.comm.message import Slot
from dat.comm.protocols import Chunked
from dat.comm.quantizer import Buckets
from dat.comm.reducer import Reducer
from dat.comm.transport import swap
from dat.comm.world import World


class Reading(NamedTuple):
    """The lower quartile of the rounds, as others on the machine only ever add; of the slowest
    worker and of the mean one."""

    seconds: float
    cpu: float
    """Seconds of cores that one worker took, in all its threads."""


def probe_swap(world: World, size: int, rounds: int) -> Reading:
    """Every worker sends `size` bytes to every other."""
    out = torch.zeros((world.size, size), dtype=torch.uint8, device=world.device)
    into = torch.zeros_like(out)
    group = dist.new_group()
    found = _time(world, rounds, lambda: swap(out, into, group, lambda rank: None))
    dist.destroy_process_group(group)
    return found


def probe_ring(world: World, size: int, rounds: int) -> Reading:
    """torch's all-reduce of `size` bytes of floats."""
    values = torch.zeros(max(size // 4, 1), device=world.device)
    return _time(world, rounds, lambda: dist.all_reduce(values))


def probe_bucket(world: World, rounds: int) -> Reading:
    """A bucket so small that nothing but the way of a bucket takes time: threads that hand it on,
    and messages."""
    quantizer, length = Buckets(bits=8), 16 * world.size
    ledger = Ledger(world.device)
    reducer = Reducer(quantizer, Chunked(), world, length=length, ledger=ledger)
    gradient, slots = torch.zeros(length, device=world.device), [Slot((1, length), 0)]
    found = _time(world, rounds, lambda: reducer.sum(0, gradient, slots).wait())
    reducer.close()
    return found


def _time(world: World, rounds: int, work: Callable[[], object]) -> Reading:
    def finish() -> None:
        work()
        if world.device.type == "cuda":
            torch.cuda.synchronize()

    finish()
    taken = []
    for _ in range(rounds):
        world.meet()
        start, cpu = time.perf_counter(), time.process_time()
        finish()
        taken.append((time.perf_counter() - start, time.process_time() - cpu))
    quartiles = [lower_quartile(it) for it in zip(*taken, strict=True)]
    mine = torch.tensor(quartiles, dtype=torch.float64)
    everyone = world.gather(mine)
    return Reading(float(everyone[:, 0].max()), float(everyone[:, 1].mean()))


def lower_quartile(taken: Sequence[float]) -> float:
    """Between the smallest and the largest, however few there are."""
    return statistics.quantiles(taken, n=4, method="inclusive")[0]
