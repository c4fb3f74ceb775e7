"""Encode and decode messages: by the native kernel on CPU, in torch elsewhere."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import warnings
from functools import cache

import torch
from torch import Tensor

from dat.comm import reference
from dat.comm.message import Message
from dat.comm.quantizer import Quantizer

NORMS = {"max": 0, "l2": 1, "given": 2}
MODES = {"set": 0, "add": 1, "subtract": 2}
VERSION = 1
"""Of what is handed over; kernel.c has the same."""
AVOID = "DAT_NO_KERNEL"
"""Set it to do without the native kernel."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel.c, if the installation could build it."""
    if os.environ.get(AVOID):
        return None
    found = importlib.util.find_spec("dat.comm._kernel")
    try:
        reason = "the installation found no C compiler with OpenMP"
        if found is not None and found.origin is not None:
            built = ctypes.CDLL(found.origin)
            if built.dat_version() == VERSION:
                return built
            reason = "it was built from another version of DAT"
    except (OSError, AttributeError) as error:
        reason = str(error)
    if os.environ.get("RANK", "0") == "0":  # one worker says it for all
        warnings.warn(
            f"no native quantizer ({reason}): torch does its work, much slower. "
            "Install gcc, then DAT again",
            stacklevel=2,
        )
    return None


class Codec:
    """Writes the messages of a quantizer and reads them."""

    def __init__(
        self, quantizer: Quantizer, *, levels: int | None = None, threads: int | None = None
    ) -> None:
        self.bits = quantizer.bits
        self.levels = levels or quantizer.levels
        self._norm = quantizer.scale
        self._random = quantizer.rounding == "random"
        self._threads = threads or torch.get_num_threads()

    def measure(self, x: Tensor, layout: Message, message: Tensor) -> None:
        """Only the steps and the floats of a message."""
        native = _native(x, message)
        if native:
            native.dat_measure(
                *(_pointer(x), *_runs(layout), self.levels),
                *(NORMS[self._norm], _pointer(message), self._threads),
            )
        else:
            reference.measure(x, layout, self.levels, self._norm, message)

    def encode(
        self, x: Tensor, layout: Message, message: Tensor, key: int, *, measured: bool = False
    ) -> None:
        """Write the values of x that belong to the message; `key` decides the rounding."""
        norm = "given" if measured else self._norm
        native = _native(x, message)
        if native:
            native.dat_encode(
                *(_pointer(x), *_runs(layout), self.bits, self.levels),
                *(NORMS[norm], int(self._random), ctypes.c_uint64(key), _pointer(message)),
                self._threads,
            )
        else:
            reference.encode(
                x,
                layout,
                bits=self.bits,
                levels=self.levels,
                norm=norm,
                random=self._random,
                key=key,
                message=message,
            )

    def decode(self, message: Tensor, layout: Message, out: Tensor, mode: str = "set") -> None:
        """Set the message's values in `out`, or `add` them to it, or `subtract` them from it."""
        self._decode(message.unsqueeze(0), layout, out, mode)

    def add_up(self, messages: Tensor, layout: Message, out: Tensor) -> None:
        """Set the sum of several messages in `out`, one row each, in their order."""
        self._decode(messages, layout, out, "set")

    def _decode(self, messages: Tensor, layout: Message, out: Tensor, mode: str) -> None:
        native = _native(out, messages[0])
        if native:
            many = ctypes.c_int64(len(messages)), ctypes.c_int64(messages.stride(0))
            native.dat_decode(
                *(_pointer(messages), *many, *_runs(layout), self.bits, MODES[mode]),
                *(_pointer(out), self._threads),
            )
        else:
            for number, message in enumerate(messages):
                how = "add" if number else mode
                reference.decode(message, layout, bits=self.bits, mode=how, out=out)


def _native(x: Tensor, message: Tensor) -> ctypes.CDLL | None:
    for tensor, kind in ((x, torch.float32), (message, torch.uint8)):
        assert tensor.dtype == kind and tensor.is_contiguous() and tensor.dim() == 1
    return library() if x.device.type == "cpu" else None


def _runs(layout: Message) -> tuple[ctypes.c_void_p, ctypes.c_int64]:
    return ctypes.c_void_p(layout.table.ctypes.data), ctypes.c_int64(len(layout.runs))


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
