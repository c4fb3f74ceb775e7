"""gradient.c and winograd.c, where the installation could compile them and they are faster."""

from __future__ import annotations

import ctypes

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
    sizes = (x.shape[0], *x.shape[2:], x.shape[1], *gradient.shape[2:], gradient.shape[1])
    layer = _Layer(*sizes, *weight.shape[2:], stride, padding)
    pointers = (_pointer(it) for it in (x, gradient, out))
    done = _library().dat_weight_gradient(*pointers, ctypes.byref(layer), torch.get_num_threads())
    return _given(out, done)


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
