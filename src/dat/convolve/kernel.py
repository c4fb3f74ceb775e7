"""gradient.c, few.c, winograd.c, where the installation could compile them and they are faster."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dat.native import load

VERSION = 1
"""Of what is handed over; gradient.c has the same."""
LAST = torch.channels_last


class _Layer(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("images", "height", "width", "channels", "rows", "columns", "filters"),
            *("kernel_height", "kernel_width", "stride", "padding"),
        )
    )


class _Shape(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("images", "height", "width", "ins", "outs")
    )


def available() -> bool:
    """Not with AVX-512, where torch's own are good."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2" and _find() is not None


def weight_gradient(
    x: Tensor, gradient: Tensor, weight: Tensor, stride: int, padding: int
) -> Tensor:
    """Of a convolution of `x`, given the loss's gradient by its output."""
    x, gradient = x.contiguous(memory_format=LAST), gradient.contiguous(memory_format=LAST)
    out = torch.empty_like(weight, memory_format=LAST)
    how = _layer(x.shape, gradient, weight, stride, padding)
    pointers = (_pointer(it) for it in (x, gradient, out))
    return _given(out, _library().dat_weight_gradient(*pointers, *how))


def input_gradient(
    shape: Sequence[int], gradient: Tensor, weight: Tensor, stride: int, padding: int
) -> Tensor:
    """Of a convolution of few channels by its input, which has this shape."""
    gradient = gradient.contiguous(memory_format=LAST)
    weight = weight.detach().contiguous(memory_format=LAST)
    out = gradient.new_empty(0).resize_(tuple(shape), memory_format=LAST)
    how = _layer(shape, gradient, weight, stride, padding)
    pointers = (_pointer(it) for it in (gradient, weight, out))
    return _given(out, _library().dat_input_gradient(*pointers, *how))


def _layer(
    shape: Sequence[int], gradient: Tensor, weight: Tensor, stride: int, padding: int
) -> tuple[Any, int]:
    """Sizes and threads."""
    images, channels, *sides = shape
    sizes = (images, *sides, channels, *gradient.shape[2:], gradient.shape[1])
    layer = _Layer(*sizes, *weight.shape[2:], stride, padding)
    return ctypes.byref(layer), torch.get_num_threads()


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, turned: bool = False
) -> Tensor:
    """With kernels of 3 x 3, stride 1 and a border of one zero. `turned`, the gradient by the input
    of such a convolution, given that by its output."""
    x, weight = x.contiguous(memory_format=LAST), weight.detach().contiguous(memory_format=LAST)
    ins, outs = weight.shape[:2] if turned else (weight.shape[1], weight.shape[0])
    images, _, *sides = x.shape
    out = x.new_empty(0).resize_((images, outs, *sides), memory_format=LAST)
    shape = _Shape(images, *sides, ins, outs)
    pointers = _pointer(x), _pointer(weight), None if bias is None else _pointer(bias)
    how = ctypes.byref(shape), int(turned), torch.get_num_threads()
    return _given(out, _library().dat_convolve(*pointers, _pointer(out), *how))


def _find() -> ctypes.CDLL | None:
    return load("dat.convolve._kernel", VERSION)


def _library() -> ctypes.CDLL:
    found = _find()
    if found is None:
        raise RuntimeError("the kernels for convolutions were not compiled")
    return found


def _given(out: Tensor, enough: int) -> Tensor:
    if not enough:
        raise MemoryError("a convolution: not enough memory")
    return out


def _pointer(values: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(values.data_ptr())
