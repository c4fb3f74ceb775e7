"""convolve.c, where it can do it: weight gradients of convolutions, faster than torch's on AVX2.

torch's convolutions reach what the processor can do but for this one: with the channels last, and
without AVX-512, a weight gradient takes half as long again as the forward pass (docs/log.md).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dat import native

VERSION = 1
"""Of what is handed over; convolve.c has the same."""
FILTERS = 16
"""Of which a layer must have a multiple."""
LEAST = 8
"""Channels of the input from which on it pays."""
LAST = torch.channels_last


class _Shape(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("images", "height", "width", "channels", "rows", "columns", "filters"),
            *("kernel_height", "kernel_width", "stride", "padding"),
        )
    )


def library() -> ctypes.CDLL | None:
    """Where it is faster than torch: AVX-512 has better kernels."""
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return None
    return native.load("dat._convolve", VERSION)


def takes(layer: nn.Module) -> bool:
    """Whether `weight_gradient` can do it, and faster than torch."""
    if type(layer) is not nn.Conv2d or layer.padding_mode != "zeros":
        return False
    stride, padding = layer.stride, layer.padding
    return (
        layer.weight.device.type == "cpu"
        and layer.weight.dtype == torch.float32
        and layer.weight.is_contiguous(memory_format=LAST)
        and not isinstance(padding, str)
        and stride[0] == stride[1]
        and padding[0] == padding[1]
        and layer.dilation == (1, 1)
        and layer.groups == 1
        and layer.kernel_size != (1, 1)
        and layer.in_channels >= LEAST
        and layer.out_channels % FILTERS == 0
    )


def weight_gradient(
    x: Tensor, gradient: Tensor, weight: Tensor, stride: int, padding: int
) -> Tensor:
    """Of a convolution of `x`, given the loss's gradient by its output; all with channels last."""
    kernel = library()
    if kernel is None:
        raise RuntimeError("there is no kernel for weight gradients here")
    x, gradient = x.contiguous(memory_format=LAST), gradient.contiguous(memory_format=LAST)
    out = torch.empty_like(weight, memory_format=LAST)
    sizes = (x.shape[0], *x.shape[2:], x.shape[1], *gradient.shape[2:], gradient.shape[1])
    shape = _Shape(*sizes, *weight.shape[2:], stride, padding)
    pointers = (ctypes.c_void_p(it.data_ptr()) for it in (x, gradient, out))
    if not kernel.dat_weight_gradient(*pointers, ctypes.byref(shape), torch.get_num_threads()):
        raise MemoryError("a convolution's weight gradient: not enough memory")
    return out


@contextmanager
def faster(layers: Iterable[nn.Module]) -> Iterator[None]:
    """What these convolutions compute in here has its weight gradient computed by the kernel."""
    changed = list(layers)
    for layer in changed:
        layer.forward = _Bound(layer)
    try:
        yield
    finally:
        for layer in changed:
            del layer.forward


class _Bound:
    """A layer's forward pass."""

    def __init__(self, layer: nn.Module):
        self.layer: Any = layer

    def __call__(self, x: Tensor) -> Tensor:
        layer = self.layer
        if x.dtype != torch.float32 or x.dim() != 4:
            return F.conv2d(x, layer.weight, layer.bias, layer.stride, layer.padding)
        convolve: Callable[..., Tensor] = _Convolution.apply
        return convolve(x, layer.weight, layer.bias, layer.stride[0], layer.padding[0])


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = stride, padding
        return F.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding = ctx.settings
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        by_kernel = for_weight and not torch.is_grad_enabled()  # torch's can be derived once more
        wanted = (for_x, for_weight and not by_kernel, for_bias)
        found: list[Tensor | None] = [None] * 3
        if any(wanted):
            found = list(
                torch.ops.aten.convolution_backward(
                    *(gradient, x, weight, [weight.shape[0]], [stride] * 2, [padding] * 2, [1, 1]),
                    *(False, [0, 0], 1, wanted),
                )
            )
        if by_kernel:
            found[1] = weight_gradient(x, gradient, weight, stride, padding)
        return (*found, None, None)
