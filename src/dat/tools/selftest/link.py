"""How fast workers exchange gradients: figures for the report, whose verdict is only about absurd
ones."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch.nn import functional as F

from dat.core import devices
from dat.distributed import Buckets, Chunked, Dense, Exchange, Ledger, Protocol, Reducer
from dat.distributed.wire_format import Slot
from dat.models import build_model
from dat.tools.selftest.result import Context, Result, failed, reported, skipped

VALUES = 2**20, 2**25
"""Values of the gradient: on the CPU, and on accelerators."""
REPEATS = 3
ABSURD = 1e14
"""Bytes per second that no link has: the clock or a missing wait is to blame."""


def link(context: Context) -> Result:
    """Seconds and bytes per second of an all-reduce and of a quantized exchange."""
    if context.world.size == 1:
        return skipped("a single worker exchanges nothing")
    length = devices.by_device(context.device, cpu=VALUES[0], accelerator=VALUES[1])
    figures: dict[str, Any] = {"values": length}
    texts = []
    for name, bits, protocol in (("dense", 32, Dense()), ("chunked 4 bits", 4, Chunked())):
        seconds, sent = _exchange(context, bits, protocol, length)
        rate = sent / seconds if seconds > 0 else float("inf")
        figures |= {f"{name}: seconds": seconds, f"{name}: bytes per second": rate}
        texts.append(f"{name} {seconds * 1e3:.1f} ms, {rate / 1e9:.2f} GB/s sent")
        if not rate < ABSURD:
            return failed(f"{name}: {sent} bytes in {seconds} s", **figures)
    return reported(f"{4 * length / 2**20:.0f} MiB: {'; '.join(texts)}", **figures)


def overlap(context: Context) -> Result:
    """The share of a step during which this worker only waits for the exchange."""
    if context.world.size == 1:
        return skipped("a single worker exchanges nothing")
    world, device = context.world, context.device
    model = build_model("preact-resnet18", 10, channels=3, width=16).to(device)
    exchange = Exchange(model, world, quantizer=Buckets())
    x = torch.rand(8, 3, 16, 16, generator=context.generator("overlap", world.rank)).to(device)
    y = torch.arange(len(x), device=device) % 10
    steps, busy, exposed = [], [], []
    for _ in range(REPEATS + 2):  # two to warm up: DDP rebuilds its buckets
        devices.synchronize(device)
        world.barrier()
        exchange.ledger.read_and_reset()
        start = time.perf_counter()
        loss = F.cross_entropy(exchange(x), y)
        receive = exchange.all_gather_stats(loss.reshape(1))
        loss.backward()
        receive()
        devices.synchronize(device)
        steps.append(time.perf_counter() - start)
        traffic = exchange.ledger.read_and_reset()
        busy.append(traffic.busy)
        exposed.append(traffic.exposed)
    exchange.close()
    step, comm, wait = (statistics.median(times[2:]) for times in (steps, busy, exposed))
    figures: dict[str, Any] = {"step_seconds": step, "busy_seconds": comm, "exposed_seconds": wait}
    if not (step > 0 and comm >= 0 and wait >= 0):
        return failed(f"step {step} s, exchange {comm} s, exposed {wait} s", **figures)
    return reported(
        f"step {step * 1e3:.1f} ms, exchange {comm * 1e3:.1f} ms, waited for "
        f"{wait * 1e3:.1f} ms ({wait / step:.0%} of the step)",
        **figures,
    )


def _exchange(context: Context, bits: int, protocol: Protocol, length: int) -> tuple[float, int]:
    """The median seconds of an exchange, and the bytes that this worker sends."""
    world, ledger = context.world, Ledger(context.device)
    quantizer = Buckets(bits=bits)
    reducer = Reducer(quantizer, protocol, world, length=length, ledger=ledger)
    generator = context.generator("link", world.rank)
    gradient = torch.randn(length, generator=generator).to(context.device)
    seconds, sent = [], 0
    for _ in range(REPEATS + 1):  # one to warm up
        ledger.read_and_reset()
        devices.synchronize(context.device)
        world.barrier()
        start = time.perf_counter()
        reducer.sum(0, gradient.clone(), [Slot((1, length), 0)]).wait()
        devices.synchronize(context.device)
        seconds.append(time.perf_counter() - start)
        world.barrier()
        sent = ledger.read_and_reset().sent
    reducer.close()
    return statistics.median(seconds[1:]), sent
