"""Convolutions of a network, computed by our kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv2d_weight

from dat.convolve.kernel import LAST, available, convolve, weight_gradient

TILE = 16
"""Filters of which the kernels want multiples; for Winograd's algorithm channels as well."""
LEAST = 8
"""Channels from which on a weight gradient pays."""
LEAST_BOTH = 32
"""Channels and filters from which on Winograd's algorithm pays."""
LEAST_TILES = 128
"""Of 2 x 2 values, from which on it makes up for preparing the kernels."""


def takes(layer: nn.Module) -> bool:
    """Whether our kernels can do it, and its weight gradient faster than torch."""
    if not isinstance(layer, nn.Conv2d) or isinstance(layer.padding, str) or not available():
        return False
    return (
        type(layer) in (nn.Conv2d, Convolution)
        and layer.padding_mode == "zeros"
        and layer.weight.device.type == "cpu"
        and layer.weight.dtype == torch.float32
        and layer.weight.is_contiguous(memory_format=LAST)
        and layer.stride[0] == layer.stride[1]
        and layer.padding[0] == layer.padding[1]
        and layer.dilation == (1, 1)
        and layer.groups == 1
        and layer.kernel_size != (1, 1)
        and layer.in_channels >= LEAST
        and layer.out_channels % TILE == 0
    )


def takes_whole(layer: nn.Module) -> bool:
    """Whether the convolution itself and its gradient by the input are faster as well."""
    if not takes(layer) or not isinstance(layer, nn.Conv2d):
        return False
    plain = layer.kernel_size == (3, 3) and layer.stride == (1, 1) and layer.padding == (1, 1)
    fits = layer.in_channels % TILE == 0
    return plain and fits and min(layer.in_channels, layer.out_channels) >= LEAST_BOTH


class Convolution(nn.Conv2d):
    """A convolution that our kernels compute."""

    def forward(self, x: Tensor) -> Tensor:
        return _forward(self, x)


def quicken(network: nn.Module) -> int:
    """Let our kernels compute a frozen network's convolutions from now on; gives how many."""
    layers = [it for it in network.modules() if takes_whole(it)]
    for layer in layers:
        layer.__class__ = Convolution
    return len(layers)


@contextmanager
def faster(layers: Iterable[nn.Module]) -> Iterator[None]:
    """What these convolutions compute in here is computed by our kernels, and so are the gradients
    of it. Weights must not change between the two."""
    changed = list(layers)
    for layer in changed:
        layer.forward = partial(_forward, layer)
    try:
        yield
    finally:
        for layer in changed:
            del layer.forward


def _forward(layer: Any, x: Tensor) -> Tensor:
    if not _plain(x):
        return F.conv2d(x, layer.weight, layer.bias, layer.stride, layer.padding)
    convolution: Callable[..., Tensor] = _Convolution.apply
    whole = takes_whole(layer) and _tiles(x) >= LEAST_TILES
    return convolution(x, layer.weight, layer.bias, layer.stride[0], layer.padding[0], whole)


def _plain(x: Tensor) -> bool:
    single = x.dtype == torch.float32 and not torch.is_autocast_enabled(x.device.type)
    return single and x.dim() == 4 and x.numel() > 0


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
        whole: bool,
    ) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.shape = x.shape
        ctx.settings = stride, padding, whole
        if whole:
            return convolve(x, weight, bias)
        return F.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding, whole = ctx.settings
        once = not torch.is_grad_enabled()  # torch's gradients can be derived once more
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        found: list[Tensor | None] = [None] * 3
        if for_weight and once:
            found[1] = weight_gradient(x, gradient, weight, stride, padding)
        elif for_weight:
            found[1] = conv2d_weight(x, weight.shape, gradient, stride, padding)
        if for_x and whole and once:
            found[0] = convolve(gradient, weight, turned=True)
        elif for_x:
            found[0] = conv2d_input(ctx.shape, weight, gradient, stride, padding)
        if for_bias:
            found[2] = gradient.sum((0, 2, 3))
        return (*found, None, None, None)
