"""Times single messages and sums between these workers, to calibrate the planner."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from dat.core import devices
from dat.distributed.protocols import Chunked
from dat.distributed.quantizers import Buckets
from dat.distributed.reducer import Reducer
from dat.distributed.traffic import Ledger
from dat.distributed.transport import all_to_all
from dat.distributed.wire_format import Slot
from dat.distributed.world import World


class ProbeResult(NamedTuple):
    """Times of one operation. The lower quartile of the rounds, because other processes on the
    machine can only add time."""

    seconds: float
    """Of the slowest worker."""
    cpu: float
    """CPU seconds of all threads of a worker, averaged over the workers."""


def probe_all_to_all(world: World, size: int, rounds: int) -> ProbeResult:
    """Every worker sends `size` bytes to every other."""
    out = torch.zeros((world.size, size), dtype=torch.uint8, device=world.device)
    into = torch.zeros_like(out)
    group = dist.new_group()
    reading = _time(world, rounds, lambda: all_to_all(out, into, group))
    dist.destroy_process_group(group)
    return reading


def probe_ring(world: World, size: int, rounds: int) -> ProbeResult:
    """torch's all-reduce of `size` bytes of float32."""
    values = torch.zeros(max(size // 4, 1), device=world.device)
    return _time(world, rounds, lambda: dist.all_reduce(values))


def probe_bucket(world: World, rounds: int) -> ProbeResult:
    """A bucket so small that only its fixed costs take time: handing it between threads, and the
    latency of its messages."""
    quantizer, length = Buckets(bits=8), 16 * world.size
    ledger = Ledger(world.device)
    reducer = Reducer(quantizer, Chunked(), world, length=length, ledger=ledger)
    gradient, slots = torch.zeros(length, device=world.device), [Slot((1, length), 0)]
    reading = _time(world, rounds, lambda: reducer.sum(0, gradient, slots).wait())
    reducer.close()
    return reading


def _time(world: World, rounds: int, operation: Callable[[], object]) -> ProbeResult:
    def run() -> None:
        operation()
        devices.synchronize(world.device)

    run()
    times = []
    for _ in range(rounds):
        world.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        run()
        times.append((time.perf_counter() - start, time.process_time() - cpu_start))
    quartiles = [lower_quartile(column) for column in zip(*times, strict=True)]
    rows = world.gather(torch.tensor(quartiles, dtype=torch.float64))
    return ProbeResult(float(rows[:, 0].max()), float(rows[:, 1].mean()))


def lower_quartile(times: Sequence[float]) -> float:
    """Interpolated between samples, so it stays within their range even for a few."""
    return statistics.quantiles(times, n=4, method="inclusive")[0]
