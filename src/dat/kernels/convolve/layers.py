"""Convolution layers of a network, computed by the native kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_input

from dat.core import devices
from dat.kernels.convolve.kernel import LAST, available, convolve, input_gradient, weight_gradient

TILE = 16
"""Two of the kernels need a multiple of this many filters; Winograd's also of input channels."""
MIN_CHANNELS_WEIGHT = 8
"""The native weight gradient pays off from this many input channels on."""
MAX_CHANNELS_INPUT = 4
"""The native input gradient pays off up to this many input channels."""
MIN_CHANNELS_WINOGRAD = 32
"""Winograd's algorithm pays off from this many input channels and filters on."""
MIN_TILES_WINOGRAD = 128
"""Winograd's algorithm pays off from this many 2 x 2 tiles on: it has to transform the weights."""


class NativePasses(NamedTuple):
    """The parts of a convolution that the native kernels compute."""

    winograd: bool = False
    """The forward pass and the gradient with respect to the input."""
    few_channels: bool = False
    """The gradient with respect to an input of few channels."""
    weight: bool = False
    """The gradient with respect to the weight."""


def native_passes(layer: nn.Module) -> NativePasses:
    """The parts of a layer that the native kernels support and compute faster than torch."""
    if type(layer) not in (nn.Conv2d, NativeConv2d) or not available():
        return NativePasses()
    assert isinstance(layer, nn.Conv2d)
    stride, padding, sizes = layer.stride, layer.padding, (layer.in_channels, layer.out_channels)
    supported = (
        layer.padding_mode == "zeros"
        and not isinstance(padding, str)
        and not devices.is_accelerator(layer.weight.device)
        and layer.weight.dtype == torch.float32
        and layer.weight.is_contiguous(memory_format=LAST)
        and stride[0] == stride[1]
        and padding[0] == padding[1]
        and layer.dilation == (1, 1)
        and layer.groups == 1
        and layer.kernel_size != (1, 1)
    )
    if not supported:
        return NativePasses()
    is_3x3 = layer.kernel_size == (3, 3) and stride == (1, 1) and padding == (1, 1)
    tiled = all(size % TILE == 0 for size in sizes)
    return NativePasses(
        winograd=is_3x3 and tiled and min(sizes) >= MIN_CHANNELS_WINOGRAD,
        few_channels=sizes[0] <= MAX_CHANNELS_INPUT,
        weight=sizes[0] >= MIN_CHANNELS_WEIGHT and sizes[1] % TILE == 0,
    )


class NativeConv2d(nn.Conv2d):
    """A convolution that the native kernels compute."""

    def forward(self, x: Tensor) -> Tensor:
        return _forward(self, x)


def use_native_convolutions(network: nn.Module) -> int:
    """Permanently switch a frozen network's convolutions to the native kernels, where those are
    faster; return how many."""
    supported = [(layer, native_passes(layer)) for layer in network.modules()]
    layers = [layer for layer, parts in supported if parts.winograd or parts.few_channels]
    for layer in layers:
        layer.__class__ = NativeConv2d
    return len(layers)


@contextmanager
def native_convolutions(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Use the native kernels for these layers inside the context, and for the backward pass of what
    is computed there. The weights must not change before that backward pass."""
    patched = list(layers)
    for layer in patched:
        layer.forward = partial(_forward, layer)
    try:
        yield
    finally:
        for layer in patched:
            del layer.forward


def _forward(layer: Any, x: Tensor) -> Tensor:
    if not _is_supported(x):
        return F.conv2d(x, layer.weight, layer.bias, layer.stride, layer.padding)
    convolution: Callable[..., Tensor] = _Convolution.apply
    parts = native_passes(layer)
    parts = parts._replace(winograd=parts.winograd and _tiles(x) >= MIN_TILES_WINOGRAD)
    return convolution(x, layer.weight, layer.bias, layer.stride[0], layer.padding[0], parts)


def _is_supported(x: Tensor) -> bool:
    is_float32 = x.dtype == torch.float32 and not torch.is_autocast_enabled(x.device.type)
    return is_float32 and x.dim() == 4 and x.numel() > 0


def _tiles(x: Tensor) -> int:
    return len(x) * ((x.shape[2] + 1) // 2) * ((x.shape[3] + 1) // 2)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: int,
        padding: int,
        parts: NativePasses,
    ) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.shape = x.shape
        ctx.settings = stride, padding, parts
        if parts.winograd:
            return convolve(x, weight, bias)
        return F.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding, parts = ctx.settings
        native = not torch.is_grad_enabled()  # for second derivatives only torch's will do
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        grads: list[Tensor | None] = [None] * 3
        if for_weight and parts.weight and native:
            grads[1] = weight_gradient(x, gradient, weight, stride, padding)
        elif for_weight:
            grads[1] = torch.ops.aten.convolution_backward(  # in the memory format of the weight
                *(gradient, x, weight, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0]),
                *(1, (False, True, False)),
            )[1]
        if for_x and parts.winograd and native:
            grads[0] = convolve(gradient, weight, transposed=True)
        elif for_x and parts.few_channels and native:
            grads[0] = input_gradient(ctx.shape, gradient, weight, stride, padding)
        elif for_x:
            grads[0] = conv2d_input(ctx.shape, weight, gradient, stride, padding)
        if for_bias:
            grads[2] = gradient.sum((0, 2, 3))
        return (*grads, None, None, None)
