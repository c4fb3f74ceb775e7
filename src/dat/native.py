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

VERSION = 1
"""Of what is handed over; native.c has the same."""


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


def _pointer(values: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(values.data_ptr())
