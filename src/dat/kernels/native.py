"""The loader of compiled libraries, and the binding of native.c: small loops over a batch, on CPU.

Each function returns None where the native version does not apply; the caller falls back to torch.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from functools import cache
from typing import TYPE_CHECKING

from dat.core import devices
from dat.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 2
"""The version of the interface; native.c has the same."""
MAX_THREADS = 4
"""With more threads, torch's several passes are faster than one pass on one thread."""


@cache
def load(module: str, version: int) -> ctypes.CDLL | None:
    """The compiled library; None if it was not built or has another version."""
    spec = importlib.util.find_spec(module)
    if os.environ.get("DAT_NO_KERNEL") or spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
        return library if library.dat_version() == version else None
    except (OSError, AttributeError):
        return None


def _library() -> ctypes.CDLL | None:
    return load("dat.kernels._native", VERSION)


def philox_words(index: Tensor, blocks: int, key: int) -> Tensor | None:
    """`blocks` blocks of four random words for each sample, as defined in `dat.core.rng`."""
    native = _library()
    if native is None or devices.is_accelerator(index.device):
        return None
    index = index.contiguous()
    out = torch.empty((len(index), blocks, 4), dtype=torch.int64)
    sizes = ctypes.c_int64(len(index)), ctypes.c_int64(blocks), ctypes.c_uint64(key)
    native.dat_philox(_pointer(index), *sizes, _pointer(out))
    return out


def crop(x: Tensor, down: Tensor, right: Tensor, flip: Tensor, padding: int) -> Tensor | None:
    """Crops of zero-padded uint8 images, flipped where `flip` is set, as in `dat.data.augment`."""
    native = _library()
    if native is None or devices.is_accelerator(x.device) or x.dtype != torch.uint8:
        return None
    x, down, right = x.contiguous(), down.contiguous(), right.contiguous()
    flip, out = flip.to(torch.uint8).contiguous(), torch.empty_like(x)
    sizes = (ctypes.c_int64(size) for size in (*x.shape, padding))
    native.dat_crop(_pointer(x), _pointer(out), *sizes, *map(_pointer, (down, right, flip)))
    return out


def ascend(x_adv: Tensor, gradient: Tensor, x: Tensor, step: float, eps: float) -> Tensor | None:
    """A projected l-infinity step, as in `dat.core.threat`, in one pass on one thread."""
    native, tensors = _library(), (x_adv, gradient, x)
    if native is None or torch.get_num_threads() > MAX_THREADS:
        return None
    if any(devices.is_accelerator(t.device) or t.dtype != torch.float32 for t in tensors):
        return None
    formats = [torch.channels_last] if x.dim() == 4 else []
    formats.append(torch.contiguous_format)
    if not any(all(t.is_contiguous(memory_format=f) for t in tensors) for f in formats):
        return None
    if not x_adv.shape == gradient.shape == x.shape:
        return None
    out = torch.empty_like(x)
    pointers = map(_pointer, (*tensors, out))
    sizes = ctypes.c_int64(x.numel()), ctypes.c_float(step), ctypes.c_float(eps)
    native.dat_ascend(*pointers, *sizes)
    return out


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
