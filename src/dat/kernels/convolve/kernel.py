"""The bindings of gradient.c, few.c and winograd.c."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dat.kernels.native import load

VERSION = 1
"""The version of the interface; gradient.c has the same."""
LAST = torch.channels_last


class _ConvolutionShape(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("images", "height", "width", "channels", "rows", "columns", "filters"),
            *("kernel_height", "kernel_width", "stride", "padding"),
        )
    )


class _WinogradShape(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("images", "height", "width", "ins", "outs")
    )


def supported() -> bool:
    """Whether the kernels were compiled and run on this CPU."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and _load() is not None


def available() -> bool:
    """Whether the kernels run here and pay off: with AVX-512, torch's own are as fast."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2" and supported()


def weight_gradient(
    x: Tensor, gradient: Tensor, weight: Tensor, stride: int, padding: int
) -> Tensor:
    """The gradient with respect to the weight of a convolution of `x`, given that of its output."""
    x, gradient = x.contiguous(memory_format=LAST), gradient.contiguous(memory_format=LAST)
    out = torch.empty_like(weight, memory_format=LAST)
    options = _options(x.shape, gradient, weight, stride, padding)
    pointers = (_pointer(tensor) for tensor in (x, gradient, out))
    return _checked(out, _library().dat_weight_gradient(*pointers, *options))


def input_gradient(
    shape: Sequence[int], gradient: Tensor, weight: Tensor, stride: int, padding: int
) -> Tensor:
    """The gradient with respect to an input of this shape, which has few channels."""
    gradient = gradient.contiguous(memory_format=LAST)
    weight = weight.detach().contiguous(memory_format=LAST)
    out = gradient.new_empty(0).resize_(tuple(shape), memory_format=LAST)
    options = _options(shape, gradient, weight, stride, padding)
    pointers = (_pointer(tensor) for tensor in (gradient, weight, out))
    return _checked(out, _library().dat_input_gradient(*pointers, *options))


def _options(
    shape: Sequence[int], gradient: Tensor, weight: Tensor, stride: int, padding: int
) -> tuple[Any, int]:
    """The shape of the convolution, as a C struct, and the number of threads."""
    images, channels, *sides = shape
    sizes = (images, *sides, channels, *gradient.shape[2:], gradient.shape[1])
    convolution = _ConvolutionShape(*sizes, *weight.shape[2:], stride, padding)
    return ctypes.byref(convolution), torch.get_num_threads()


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False
) -> Tensor:
    """A convolution with 3 x 3 kernels, stride 1 and padding 1; `transposed`, the gradient with
    respect to its input, where `x` is the gradient of its output."""
    x, weight = x.contiguous(memory_format=LAST), weight.detach().contiguous(memory_format=LAST)
    ins, outs = weight.shape[:2] if transposed else (weight.shape[1], weight.shape[0])
    images, _, *sides = x.shape
    out = x.new_empty(0).resize_((images, outs, *sides), memory_format=LAST)
    shape = _WinogradShape(images, *sides, ins, outs)
    pointers = _pointer(x), _pointer(weight), None if bias is None else _pointer(bias)
    options = ctypes.byref(shape), int(transposed), torch.get_num_threads()
    return _checked(out, _library().dat_convolve(*pointers, _pointer(out), *options))


def _load() -> ctypes.CDLL | None:
    return load("dat.kernels.convolve._kernel", VERSION)


def _library() -> ctypes.CDLL:
    library = _load()
    if library is None:
        raise RuntimeError("the convolution kernels are not compiled")
    return library


def _checked(out: Tensor, succeeded: int) -> Tensor:
    """`out`, unless the kernel reports that an allocation failed."""
    if not succeeded:
        raise MemoryError("not enough memory for a convolution")
    return out


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
