"""Convolutions of a network, computed by our kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_input

from dat.convolve.kernel import LAST, available, convolve, input_gradient, weight_gradient

TILE = 16
"""Filters of which two of the kernels want multiples; Winograd's algorithm channels as well."""
LEAST = 8
"""Channels from which on a weight gradient pays."""
FEW = 4
"""Channels up to which the gradient by the input pays."""
LEAST_BOTH = 32
"""Channels and filters from which on Winograd's algorithm pays."""
LEAST_TILES = 128
"""Of 2 x 2 values, from which on it makes up for preparing the kernels."""


class Ways(NamedTuple):
    """What our kernels compute of a convolution."""

    whole: bool = False
    """It, and its gradient by the input."""
    few: bool = False
    """Its gradient by an input of few channels."""
    weight: bool = False
    """Its gradient by the weights."""


def ways(layer: nn.Module) -> Ways:
    """Where our kernels can do it, and faster than torch."""
    if type(layer) not in (nn.Conv2d, Convolution) or not available():
        return Ways()
    assert isinstance(layer, nn.Conv2d)
    stride, padding, sizes = layer.stride, layer.padding, (layer.in_channels, layer.out_channels)
    usual = (
        layer.padding_mode == "zeros"
        and not isinstance(padding, str)
        and layer.weight.device.type == "cpu"
        and layer.weight.dtype == torch.float32
        and layer.weight.is_contiguous(memory_format=LAST)
        and stride[0] == stride[1]
        and padding[0] == padding[1]
        and layer.dilation == (1, 1)
        and layer.groups == 1
        and layer.kernel_size != (1, 1)
    )
    if not usual:
        return Ways()
    plain = layer.kernel_size == (3, 3) and stride == (1, 1) and padding == (1, 1)
    even = all(size % TILE == 0 for size in sizes)
    return Ways(
        whole=plain and even and min(sizes) >= LEAST_BOTH,
        few=sizes[0] <= FEW,
        weight=sizes[0] >= LEAST and sizes[1] % TILE == 0,
    )


class Convolution(nn.Conv2d):
    """A convolution that our kernels compute."""

    def forward(self, x: Tensor) -> Tensor:
        return _forward(self, x)


def quicken(network: nn.Module) -> int:
    """Let our kernels compute a frozen network's convolutions from now on; gives how many."""
    layers = [it for it in network.modules() if ways(it).whole or ways(it).few]
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
    how = ways(layer)
    how = how._replace(whole=how.whole and _tiles(x) >= LEAST_TILES)
    return convolution(x, layer.weight, layer.bias, layer.stride[0], layer.padding[0], how)


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
        how: Ways,
    ) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.shape = x.shape
        ctx.settings = stride, padding, how
        if how.whole:
            return convolve(x, weight, bias)
        return F.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding, how = ctx.settings
        once = not torch.is_grad_enabled()  # torch's gradients can be derived once more
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        found: list[Tensor | None] = [None] * 3
        if for_weight and how.weight and once:
            found[1] = weight_gradient(x, gradient, weight, stride, padding)
        elif for_weight:
            found[1] = torch.ops.aten.convolution_backward(  # laid out as the weights are
                *(gradient, x, weight, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0]),
                *(1, (False, True, False)),
            )[1]
        if for_x and how.whole and once:
            found[0] = convolve(gradient, weight, turned=True)
        elif for_x and how.few and once:
            found[0] = input_gradient(ctx.shape, gradient, weight, stride, padding)
        elif for_x:
            found[0] = conv2d_input(ctx.shape, weight, gradient, stride, padding)
        if for_bias:
            found[2] = gradient.sum((0, 2, 3))
        return (*found, None, None, None)
