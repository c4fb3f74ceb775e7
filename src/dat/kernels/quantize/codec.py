"""Encodes and decodes messages: with the native kernel on the CPU, with Triton on GPUs, in torch
elsewhere. All give the same bits."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import warnings
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from dat.core import devices
from dat.kernels.quantize import reference
from dat.kernels.quantize.layout import MessageLayout

NORM_CODES = {"max": 0, "l2": 1, "given": 2}
MODE_CODES = {"set": 0, "add": 1, "subtract": 2}
VERSION = 2
"""Version of the C interface; must equal `dat_version` in kernel.c."""
DISABLE_VARIABLE = "DAT_NO_KERNEL"
"""Environment variable that disables the native kernel and the Triton kernels."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel.c; `None` if it was not built or is disabled."""
    if os.environ.get(DISABLE_VARIABLE):
        return None
    spec = importlib.util.find_spec("dat.kernels.quantize._kernel")
    try:
        reason = "the installation found no C compiler with OpenMP"
        if spec is not None and spec.origin is not None:
            built = ctypes.CDLL(spec.origin)
            if built.dat_version() == VERSION:
                return built
            reason = "it was built from another version of DAT"
    except (OSError, AttributeError) as error:
        reason = str(error)
    _warn(
        f"no native quantizer ({reason}): falling back to torch, which is much slower. "
        "Install gcc, then reinstall DAT"
    )
    return None


@cache
def triton_quantizer(device: torch.device) -> Any:
    """The module with the Triton kernels; `None` on the CPU, and where they cannot run."""
    if os.environ.get(DISABLE_VARIABLE) or not devices.is_accelerator(device):
        return None
    advice = f"Triton does not support this {device.type.upper()} device"
    if devices.supports_triton(device):
        try:
            return importlib.import_module("dat.kernels.quantize.triton_launch")
        except ImportError as error:
            advice = f"{error}. Install triton"
    _warn(f"no Triton quantizer: falling back to torch, which is much slower. {advice}")
    return None


def _warn(message: str) -> None:
    """Warn once, not once per worker."""
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(message, stacklevel=3)


class Coding(Protocol):
    """The properties of a quantizer that define its messages."""

    @property
    def bits(self) -> int: ...
    @property
    def levels(self) -> int: ...
    @property
    def scale(self) -> str: ...
    @property
    def rounding(self) -> str: ...


class Codec:
    """Encodes and decodes the messages of a quantizer."""

    def __init__(
        self, quantizer: Coding, *, levels: int | None = None, threads: int | None = None
    ) -> None:
        self.bits = quantizer.bits
        self.levels = levels or quantizer.levels
        self._norm = quantizer.scale
        self._random = quantizer.rounding == "random"
        self._threads = threads or torch.get_num_threads()

    def measure(self, x: Tensor, layout: MessageLayout, message: Tensor) -> None:
        """Write only the step sizes and the float32 values of a message."""
        native = _native(x, message)
        if native:
            native.dat_measure(
                *(_pointer(x), *_runs(layout), self.levels),
                *(NORM_CODES[self._norm], _pointer(message), self._threads),
            )
        else:
            (triton_quantizer(x.device) or reference).measure(
                x, layout, self.levels, self._norm, message
            )

    def encode(
        self, x: Tensor, layout: MessageLayout, message: Tensor, key: int, *, measured: bool = False
    ) -> None:
        """Write the message that encodes `x`; `key` seeds the random rounding."""
        norm = "given" if measured else self._norm
        native = _native(x, message)
        if native:
            native.dat_encode(
                *(_pointer(x), *_runs(layout), self.bits, self.levels),
                *(NORM_CODES[norm], int(self._random), ctypes.c_uint64(key), _pointer(message)),
                self._threads,
            )
        else:
            kernels = triton_quantizer(x.device) or reference
            kernels.encode(
                x,
                layout,
                bits=self.bits,
                levels=self.levels,
                norm=norm,
                random=self._random,
                key=key,
                message=message,
            )

    def decode(
        self, message: Tensor, layout: MessageLayout, out: Tensor, mode: str = "set"
    ) -> None:
        """Write the message's values to `out` (mode `set`), or `add` or `subtract` them."""
        self._decode(message.unsqueeze(0), layout, out, mode)

    def add_up(self, messages: Tensor, layout: MessageLayout, out: Tensor) -> None:
        """Write the sum of several messages, one per row, to `out`; sums in row order."""
        self._decode(messages, layout, out, "set")

    def _decode(self, messages: Tensor, layout: MessageLayout, out: Tensor, mode: str) -> None:
        native = _native(out, messages[0])
        if native:
            count_and_stride = ctypes.c_int64(len(messages)), ctypes.c_int64(messages.stride(0))
            native.dat_decode(
                *(_pointer(messages), *count_and_stride, *_runs(layout)),
                *(self.bits, MODE_CODES[mode]),
                *(_pointer(out), self._threads),
            )
        elif kernels := triton_quantizer(out.device):
            kernels.decode(messages, layout, bits=self.bits, mode=mode, out=out)
        else:
            for message in messages:
                reference.decode(message, layout, bits=self.bits, mode=mode, out=out)
                mode = "add"  # from the second message on


def _native(x: Tensor, message: Tensor) -> ctypes.CDLL | None:
    for tensor, dtype in ((x, torch.float32), (message, torch.uint8)):
        assert tensor.dtype == dtype and tensor.is_contiguous() and tensor.dim() == 1
    return None if devices.is_accelerator(x.device) else library()


def _runs(layout: MessageLayout) -> tuple[ctypes.c_void_p, ctypes.c_int64]:
    return ctypes.c_void_p(layout.table.ctypes.data), ctypes.c_int64(len(layout.runs))


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
