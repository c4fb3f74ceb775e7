"""Deterministic backward passes of layers for which torch has none on GPUs.

With `torch.use_deterministic_algorithms(True)` torch raises an error in the backward pass of
adaptive average pooling, of bilinear and of bicubic resizing, which add with atomics. All three are
linear and act on rows and columns separately, so a backward pass is two products with the
transposed matrices. Registered for a kind of device, they replace torch's own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.library import Library
from torch.nn import functional as F

_registered: dict[str, Library] = {}
"""By dispatch key; torch's own kernels come back when a library is released."""


def register(dispatch_key: str) -> None:
    """Use these kernels on a kind of device from now on: `CUDA`, `XPU`, ..."""
    if dispatch_key in _registered:
        return
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():  # torch warns that its own kernels are overridden
        warnings.simplefilter("ignore")
        library.impl("_adaptive_avg_pool2d_backward", adaptive_avg_pool2d_backward, dispatch_key)
        for mode in ("bilinear", "bicubic"):
            backward = _resize_backward(mode)
            library.impl(f"upsample_{mode}2d_backward", backward, dispatch_key)
    _registered[dispatch_key] = library


def unregister(dispatch_key: str) -> None:
    """Use torch's own kernels again."""
    if library := _registered.pop(dispatch_key, None):
        library._destroy()


def adaptive_avg_pool2d_backward(gradient: Tensor, x: Tensor) -> Tensor:
    rows, columns = (_pooling(x.shape[d], gradient.shape[d]) for d in (-2, -1))
    return _apply(gradient, rows, columns)


def _resize_backward(mode: str) -> Callable[..., Tensor]:
    def backward(
        gradient: Tensor,
        output_size: list[int],
        input_size: list[int],
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Tensor:
        sizes = zip(input_size[-2:], output_size, (scales_h, scales_w), strict=True)
        rows, columns = (_resizing(mode, *size, align_corners) for size in sizes)
        return _apply(gradient, rows, columns)

    return backward


def _apply(gradient: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """rows^T @ gradient @ columns, for each image and channel."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    rows, columns = (matrix.to(gradient.device, wide) for matrix in (rows, columns))
    return (rows.T @ (gradient.to(wide) @ columns)).to(gradient.dtype)


@cache
def _pooling(size: int, output_size: int) -> Tensor:
    """The matrix of adaptive average pooling along one dimension, (output_size, size)."""
    basis = torch.eye(size, dtype=torch.float64).unsqueeze(1)
    return F.adaptive_avg_pool1d(basis, output_size).squeeze(1).T


@cache
def _resizing(
    mode: str, size: int, output_size: int, scale: float | None, align_corners: bool
) -> Tensor:
    """The matrix of resizing along one dimension, (output_size, size)."""
    resize = getattr(torch.ops.aten, f"upsample_{mode}2d").default
    basis = torch.eye(size, dtype=torch.float64).view(size, 1, size, 1)
    resized: Tensor = resize(basis, (output_size, 1), align_corners, scale, None)
    return resized.view(size, output_size).T
