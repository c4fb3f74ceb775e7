"""What this machine can do at best: multiply and add, move memory, convolve."""

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

from dat.comm.world import cores

SIDE = 1536
"""Of the matrices that are multiplied."""
COPIED = 2**25
"""Floats that are copied: more than any cache holds."""
TRIES = 5


class Limits(NamedTuple):
    """Rates that nothing on this machine surpasses for long."""

    flops: float
    """Floating-point operations a second, of a multiplication of two matrices."""
    bandwidth: float
    """Bytes a second, of a copy: those read and those written."""


def best(work: Callable[[], object], tries: int = TRIES) -> float:
    """The seconds of the quickest of some tries: a limit, not what is usual."""
    work()
    seconds = []
    for _ in range(tries):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure_limits(side: int = SIDE, copied: int = COPIED) -> Limits:
    random = torch.Generator().manual_seed(0)
    a, b = (torch.randn(side, side, generator=random) for _ in range(2))
    product = torch.empty(side, side)
    source, target = torch.ones(copied), torch.empty(copied)
    return Limits(
        flops=2 * side**3 / best(lambda: torch.mm(a, b, out=product)),
        bandwidth=2 * source.nbytes / best(lambda: target.copy_(source)),
    )


def use_threads(threads: int | None) -> None:
    torch.set_num_threads(threads or cores())


def describe_machine(limits: Limits) -> dict[str, Any]:
    """Where figures come from, without which they mean little."""
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


class Passes(NamedTuple):
    """Seconds that the convolutions of a network take by themselves, one by one, channels last; and
    the floating-point operations of one pass over them."""

    forward: float
    to_input: float
    to_weight: float
    to_images: float
    """The part of `to_input` that only an attack needs: the first layer's."""
    flops: float
    first_flops: float
    """The first layer's part of that."""

    def attack(self, steps: int) -> tuple[float, float]:
        """Seconds and operations of so many gradients of the images."""
        return steps * (self.forward + self.to_input), 2 * steps * self.flops

    def update(self) -> tuple[float, float]:
        """Seconds and operations of one gradient of the weights."""
        seconds = self.forward + self.to_input - self.to_images + self.to_weight
        return seconds, 3 * self.flops - self.first_flops


class _Layer(NamedTuple):
    """A convolution, as far as its speed goes."""

    images: torch.Size
    weight: torch.Size
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def is_unsafe(self) -> bool:
        """With fewer than 8 channels last, oneDNN's gradient of the weights of a strided 1 x 1
        convolution writes where it must not (torch 2.13 with AVX2), and the process may end."""
        return self.weight[1] < 8 and self.weight[2:] == (1, 1) and max(self.stride) > 1


def time_convolutions(model: nn.Module, x: Tensor, tries: int = TRIES) -> Passes:
    """Measure every convolution that `model` does on a batch like `x`."""
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
    return Passes(forward, to_input, to_weight, first, flops, first_flops)


@torch.no_grad()
def _convolutions(model: nn.Module, x: Tensor) -> list[_Layer]:
    found: list[_Layer] = []

    def see(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(module, nn.Conv2d) and not isinstance(module.padding, str)
        options = (module.stride, module.padding, module.dilation, module.groups)
        found.append(_Layer(inputs[0].shape, module.weight.shape, *options))

    hooks = [
        module.register_forward_hook(see)
        for module in model.modules()
        if isinstance(module, nn.Conv2d) and not isinstance(module.padding, str)
    ]
    try:
        model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@torch.no_grad()
def _time(layer: _Layer, tries: int) -> tuple[tuple[float, float, float], float]:
    """Forward, gradient of the input, gradient of the weights; and the operations of one."""
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
