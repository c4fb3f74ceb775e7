"""A short measurement of this machine: kernels, messages and all-reduces between two workers.

Both workers do the same at the same time, so that memory is as busy as in training. With root
rights they run on simulated hosts (network namespaces with unlimited links), else they communicate
over the loopback, which is slightly cheaper than a link between hosts.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from dat.core import devices
from dat.distributed import Buckets, World
from dat.distributed.probe import probe_all_to_all, probe_bucket, probe_ring
from dat.distributed.wire_format import Slot, message_layout, spans
from dat.jobs.launch import dat_command
from dat.kernels.quantize.codec import Codec
from dat.tools.bench import run_workers, testbed
from dat.tools.bench.workers import LOCAL
from dat.tools.planning.cluster import UNSHAPED
from dat.tools.planning.costs import Costs, fingerprint, read

WORKERS = 2
VALUES = 4_000_000
"""Values of an encoded gradient: more than fit into caches."""
MESSAGES = 4
"""Messages in a sum."""
BITS = (32, 16, 8, 4, 2)
LARGE = 16 << 20
"""Bytes of a message whose latency is negligible."""
ROUNDS = 15
TINY_ROUNDS = 300


def calibrate() -> Costs:
    """Measure this machine with two workers."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "costs.json"
        words = dat_command("plan", "--calibrate", "--result", str(result))
        if os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc"):
            with testbed(WORKERS, UNSHAPED) as hosts:
                run_workers(hosts, words)
        else:
            run_workers([LOCAL] * WORKERS, words)
        return read(result)


def measure(result: Path) -> None:
    """Run on every worker; the first one writes the costs to `result`."""
    with World.join(threads=1) as world:
        kernels: dict[str, dict[int, float]] = {}
        for bits in BITS:
            for job, seconds in _kernels(bits, world).items():
                kernels.setdefault(job, {})[bits] = seconds
        swap, ring = probe_all_to_all(world, LARGE, ROUNDS), probe_ring(world, LARGE, ROUNDS)
        tiny, hop = probe_all_to_all(world, 8, TINY_ROUNDS), probe_ring(world, 8, TINY_ROUNDS)
        bucket = probe_bucket(world, TINY_ROUNDS)
        latency = hop.seconds / 2  # a round trip
        where = "loopback" if os.environ.get("GLOO_SOCKET_IFNAME") == "lo" else "hosts"
        costs = {
            "kernels": kernels,
            "byte": swap.cpu / LARGE,
            "stream": swap.seconds / LARGE,
            "ring_byte": ring.cpu / LARGE,
            "ring_stream": ring.seconds / LARGE,
            "message": tiny.cpu / 2,
            "latency": latency,
            "bucket": max((bucket.seconds - 2 * latency) / 2, 0.0),
            "origin": f"measured between two workers on this machine ({where})",
            "machine": fingerprint(),
        }
        if world.first:
            result.write_text(json.dumps(costs))


def _kernels(bits: int, world: World) -> dict[str, float]:
    """Seconds per value of the slowest worker."""
    quantizer = Buckets(bits=bits)
    codec = Codec(quantizer)
    random = torch.Generator().manual_seed(world.rank)
    x = torch.randn(VALUES, generator=random).to(world.device)
    layout = message_layout(spans([Slot((1, VALUES), 0)], quantizer), bits)
    part = message_layout(spans([Slot((1, VALUES // MESSAGES), 0)], quantizer), bits)
    message = torch.zeros(layout.size, dtype=torch.uint8, device=world.device)
    messages = torch.zeros((MESSAGES, part.size), dtype=torch.uint8, device=world.device)
    jobs: dict[str, Callable[[], None]] = {
        "encode": lambda: codec.encode(x, layout, message, 1),
        "decode": lambda: codec.decode(message, layout, x),
        "add": lambda: codec.add_up(messages, part, x[: VALUES // MESSAGES]),
        "measure": lambda: codec.measure(x, layout, message),
    }
    seconds = {}
    for name, job in jobs.items():
        world.barrier()
        seconds[name] = _median(job, world) / VALUES
    mine = torch.tensor(list(seconds.values()), dtype=torch.float64)
    return dict(zip(seconds, world.gather(mine).amax(0).tolist(), strict=True))


def _median(job: Callable[[], None], world: World) -> float:
    """Median seconds; on CPUs the thread's CPU time, which other processes do not affect."""
    clock = time.perf_counter if devices.is_accelerator(world.device) else time.thread_time
    job()
    taken = []
    for _ in range(ROUNDS):
        start = clock()
        job()
        devices.synchronize(world.device)
        taken.append(clock() - start)
    return statistics.median(taken)
