"""The best that this machine can do: matrix products, memory copies, convolutions."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dat.distributed.affinity import cores

SIDE = 1536
"""Rows and columns of the matrices that are multiplied."""
COPIED = 2**25
"""Floats that are copied: more than fit into any cache."""
TRIES = 5


class MachineLimits(NamedTuple):
    """Peak rates of this machine."""

    flops: float
    """Floating-point operations per second of a matrix product."""
    bandwidth: float
    """Bytes per second of a copy, read and written."""


def best(work: Callable[[], object], tries: int = TRIES) -> float:
    """The seconds of the fastest try: a limit, not a typical value."""
    work()
    seconds = []
    for _ in range(tries):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure_limits(side: int = SIDE, copied: int = COPIED) -> MachineLimits:
    random = torch.Generator().manual_seed(0)
    a, b = (torch.randn(side, side, generator=random) for _ in range(2))
    product = torch.empty(side, side)
    source, target = torch.ones(copied), torch.empty(copied)
    return MachineLimits(
        flops=2 * side**3 / best(lambda: torch.mm(a, b, out=product)),
        bandwidth=2 * source.nbytes / best(lambda: target.copy_(source)),
    )


def use_threads(threads: int | None) -> None:
    torch.set_num_threads(threads or cores())


def describe_machine(limits: MachineLimits) -> dict[str, Any]:
    """What a reader needs to know to interpret the timings."""
    allocator = ("MALLOC_", "LD_PRELOAD", "GLIBC_TUNABLES")
    return {
        "processor": _processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "allocator": {k: v for k, v in sorted(os.environ.items()) if k.startswith(allocator)},
        "matmul_gflops": limits.flops / 1e9,
        "copy_gb_per_second": limits.bandwidth / 1e9,
    }


def _processor() -> str:
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


class ConvolutionCosts(NamedTuple):
    """Seconds that the convolutions of a network take by themselves, one by one, channels last; and
    the floating-point operations of one pass over them."""

    forward: float
    to_input: float
    to_weight: float
    to_images: float
    """The first layer's part of `to_input`, which only an attack needs."""
    flops: float
    first_flops: float
    """The first layer's part of `flops`."""

    def attack(self, steps: int) -> tuple[float, float]:
        """Seconds and operations of `steps` gradients with respect to the images."""
        return steps * (self.forward + self.to_input), 2 * steps * self.flops

    def update(self) -> tuple[float, float]:
        """Seconds and operations of one gradient with respect to the weights."""
        seconds = self.forward + self.to_input - self.to_images + self.to_weight
        return seconds, 3 * self.flops - self.first_flops


class _MeasuredConvolution(NamedTuple):
    """Everything that the speed of a convolution depends on."""

    images: torch.Size
    weight: torch.Size
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def is_unsafe(self) -> bool:
        """With fewer than 8 channels, channels last, oneDNN's weight gradient of a strided 1 x 1
        convolution writes out of bounds and may crash the process (torch 2.13 with AVX2)."""
        return self.weight[1] < 8 and self.weight[2:] == (1, 1) and max(self.stride) > 1


def time_convolutions(model: nn.Module, x: Tensor, tries: int = TRIES) -> ConvolutionCosts:
    """Time every convolution of `model` on a batch like `x`."""
    layers = _convolutions(model, x)
    total, flops = torch.zeros(3, dtype=torch.float64), 0.0
    first, first_flops = 0.0, 0.0
    for layer, count in Counter(layers).items():
        seconds, work = _time(layer, tries)
        total += count * torch.tensor(seconds, dtype=torch.float64)
        flops += count * work
        if layer == layers[0]:
            first, first_flops = seconds[1], work
    forward, to_input, to_weight = total.tolist()
    return ConvolutionCosts(forward, to_input, to_weight, first, flops, first_flops)


@torch.no_grad()
def _convolutions(model: nn.Module, x: Tensor) -> list[_MeasuredConvolution]:
    convolutions: list[_MeasuredConvolution] = []

    def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(module, nn.Conv2d) and not isinstance(module.padding, str)
        options = (module.stride, module.padding, module.dilation, module.groups)
        convolutions.append(_MeasuredConvolution(inputs[0].shape, module.weight.shape, *options))

    hooks = [
        module.register_forward_hook(record)
        for module in model.modules()
        if isinstance(module, nn.Conv2d) and not isinstance(module.padding, str)
    ]
    try:
        model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return convolutions


@torch.no_grad()
def _time(layer: _MeasuredConvolution, tries: int) -> tuple[tuple[float, float, float], float]:
    """Seconds of the forward pass, the input gradient and the weight gradient; and the operations
    of one of them."""
    _, weight_shape, stride, padding, dilation, groups = layer
    layout = torch.contiguous_format if layer.is_unsafe else torch.channels_last
    x = torch.randn(layer.images).contiguous(memory_format=layout)
    weight = torch.randn(weight_shape).contiguous(memory_format=layout)

    def forward() -> Tensor:
        return F.conv2d(x, weight, None, stride, padding, dilation, groups)

    gradient = torch.randn_like(forward())

    def backward(*wanted: bool) -> object:
        options = (None, stride, padding, dilation, False, [0, 0], groups, (*wanted, False))
        return torch.ops.aten.convolution_backward(gradient, x, weight, *options)

    work = 2.0 * gradient.numel() * weight_shape[1:].numel()
    seconds = (
        best(forward, tries),
        best(lambda: backward(True, False), tries),
        best(lambda: backward(False, True), tries),
    )
    return seconds, work
