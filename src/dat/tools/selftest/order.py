"""Whoever reads the summed gradient waits for the exchange, and the exchange for the gradient.

A step is made slow where a missing wait would show: before the gradient is written, and inside the
exchange. Its gradients, read at once, have to be those of a step that waits for everything. On
accelerators the delay is work on the stream, behind which the host runs ahead; on the CPU, the
lanes of the reducer sleep.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from dat.core import devices
from dat.distributed import Buckets, Chunked, Dense, Exchange, Protocol
from dat.distributed.protocols.chunked import ChunkedRoute
from dat.distributed.routes import GradientBucket, GradientRoute, RoundingKeys
from dat.distributed.traffic import SentBytes
from dat.tools.selftest.result import Context, Result, failed, passed

DELAY = 0.1
"""Seconds that a lane sleeps."""
SIDE, PRODUCTS = 4096, 16
"""Matrix products that keep an accelerator busy for about as long."""

ROUNDING = 1e-5
"""Relative error of a sum of floats; codes of 8 bits are off by up to 4e-3."""


def order(context: Context) -> Result:
    """The gradients of slow steps, read at once, against those of fully synchronized steps."""
    compared: tuple[tuple[str, int, Protocol, Protocol], ...] = (
        ("chunked, 8 bits", 8, Chunked(), SlowChunked()),
        ("dense", 32, Dense(), Dense()),
    )
    for name, bits, plain, slow in compared:
        expected = _gradients(context, bits, plain, slow=False)
        actual = _gradients(context, bits, slow, slow=True)
        for step, (one, other) in enumerate(zip(actual, expected, strict=True)):
            limit = ROUNDING * other.abs().max()  # an all-reduce may add up in another order
            wrong = int((~((one - other).abs() <= limit)).sum())
            if wrong:
                return failed(
                    f"{name}: {wrong} of {len(one)} gradients of step {step} were summed before "
                    "they were computed, or read before they were summed",
                    steps=len(actual),
                )
    steps = len(expected)
    kind = "streams" if devices.is_accelerator(context.device) else "lanes"
    return passed(f"delayed {kind}, {steps} step{'s' * (steps > 1)} each: chunked and dense")


class SlowChunked(Chunked):
    """`chunked` with a delay in both of its stages."""

    def route(self, bucket: GradientBucket) -> GradientRoute:
        return _SlowRoute(bucket)


class _SlowRoute(ChunkedRoute):
    def collect(self, x: Tensor, keys: RoundingKeys, group: Any) -> SentBytes:
        _keep_busy(x.device)
        return super().collect(x, keys, group)

    def spread(self, x: Tensor, group: Any) -> SentBytes:
        _keep_busy(x.device)
        return super().spread(x, group)


class _SlowBackward(torch.autograd.Function):
    """Identity; the gradient comes late."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, late: bool) -> Tensor:
        ctx.late = late
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.late:
            _keep_busy(gradient.device)
        return gradient, None


class _Net(nn.Module):
    """Two layers; the gradient of the first one, which ends the backward pass, may come late."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(65, 129), nn.Linear(129, 33)
        self.late = late

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = _SlowBackward.apply(self.first(x), self.late)  # type: ignore[no-untyped-call]
        result: Tensor = self.second(hidden)
        return result


def _gradients(context: Context, bits: int, protocol: Protocol, *, slow: bool) -> list[Tensor]:
    """The summed gradients of each step. Without `slow`, they are read when the exchange has been
    closed, or the device has finished."""
    world, device = context.world, context.device
    # on the CPU the last worker is late, so that the others' sums cannot be there early
    late = slow and (devices.is_accelerator(device) or world.rank == world.size - 1)
    net = _Net(late)
    with torch.no_grad():
        generator = context.generator("order")
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    net = net.to(device)
    exchange = Exchange(net, world, quantizer=Buckets(bits=bits), protocol=protocol)
    results = []
    for step in range(devices.by_device(device, cpu=1, accelerator=3)):
        x = torch.randn(16, 65, generator=context.generator("order", world.rank, step)).to(device)
        if not slow:
            devices.synchronize(device)
            world.barrier()
        exchange.begin(0, step)
        exchange(x).square().sum().backward()
        if not slow and not devices.is_accelerator(device):
            exchange.close()  # finishes the buckets in flight
        if not slow:
            devices.synchronize(device)
        elif devices.is_accelerator(device):  # overwrites memory that was freed too early
            torch.full((SIDE, SIDE), torch.nan, device=device)
        results.append(torch.cat([_gradient(parameter) for parameter in net.parameters()]))
        net.zero_grad(set_to_none=False)
    if slow or devices.is_accelerator(device):
        exchange.close()
    devices.synchronize(device)
    return [result.cpu() for result in results]


def _gradient(parameter: nn.Parameter) -> Tensor:
    """A copy, enqueued now."""
    assert parameter.grad is not None
    return parameter.grad.flatten().clone()


def _keep_busy(device: torch.device) -> None:
    """Delay the current stream; on the CPU, the thread."""
    if not devices.is_accelerator(device):
        time.sleep(DELAY)
        return
    matrix = torch.full((SIDE, SIDE), 1.0 / SIDE, device=device)
    for _ in range(PRODUCTS):
        matrix = matrix @ matrix
