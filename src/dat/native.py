"""What was compiled from C, and native.c of it: small loops over a batch on the CPU.

Every function gives none where it cannot be done natively; the caller then does the same in torch.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

VERSION = 2
"""Of what is handed over; native.c has the same."""


FEW_THREADS = 4
DENSE = torch.contiguous_format


@cache
def load(module: str, version: int) -> ctypes.CDLL | None:
    """The library, if the installation could build it and it is of this version."""
    found = importlib.util.find_spec(module)
    if os.environ.get("DAT_NO_KERNEL") or found is None or found.origin is None:
        return None
    try:
        built = ctypes.CDLL(found.origin)
        return built if built.dat_version() == version else None
    except (OSError, AttributeError):
        return None


def _library() -> ctypes.CDLL | None:
    return load("dat._native", VERSION)


def philox_words(index: Tensor, blocks: int, key: int) -> Tensor | None:
    """Four random words in each of some blocks for every sample, as `dat.rng` defines them."""
    native = _library()
    if native is None or index.device.type != "cpu":
        return None
    index = index.contiguous()
    out = torch.empty((len(index), blocks, 4), dtype=torch.int64)
    sizes = ctypes.c_int64(len(index)), ctypes.c_int64(blocks), ctypes.c_uint64(key)
    native.dat_philox(_pointer(index), *sizes, _pointer(out))
    return out


def crop(x: Tensor, down: Tensor, right: Tensor, flip: Tensor, padding: int) -> Tensor | None:
    """Windows of padded images in bytes, some of them mirrored, as `dat.data.augment` cuts them."""
    native = _library()
    if native is None or x.device.type != "cpu" or x.dtype != torch.uint8:
        return None
    x, down, right = x.contiguous(), down.contiguous(), right.contiguous()
    flip, out = flip.to(torch.uint8).contiguous(), torch.empty_like(x)
    sizes = (ctypes.c_int64(size) for size in (*x.shape, padding))
    native.dat_crop(_pointer(x), _pointer(out), *sizes, *map(_pointer, (down, right, flip)))
    return out


def ascend(x_adv: Tensor, gradient: Tensor, x: Tensor, step: float, eps: float) -> Tensor | None:
    """A step in the maximum norm and back into the ball, as `dat.threat` takes it, in one pass on
    one thread; with many threads, torch's several passes are the faster."""
    native, tensors = _library(), (x_adv, gradient, x)
    if native is None or torch.get_num_threads() > FEW_THREADS:
        return None
    if any(it.device.type != "cpu" or it.dtype != torch.float32 for it in tensors):
        return None
    form = torch.channels_last if x.dim() == 4 else torch.contiguous_format
    if not any(all(it.is_contiguous(memory_format=f) for it in tensors) for f in (form, DENSE)):
        return None
    if not x_adv.shape == gradient.shape == x.shape:
        return None
    out = torch.empty_like(x)
    pointers = map(_pointer, (*tensors, out))
    sizes = ctypes.c_int64(x.numel()), ctypes.c_float(step), ctypes.c_float(eps)
    native.dat_ascend(*pointers, *sizes)
    return out


def _pointer(values: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(values.data_ptr())
