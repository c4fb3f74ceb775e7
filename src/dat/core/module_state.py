"""Restore a module's mode and buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dat.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Restore every module's train/eval mode and buffers on exit.

    Buffers hold what a network counts or averages in its forward pass, possibly in eval mode too.
    Uninitialized lazy buffers are skipped.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer._version, buffer.detach().clone())
        for module, _ in modes
        for name, buffer in module._buffers.items()
        if buffer is not None
        and not torch.nn.parameter.is_lazy(buffer)
        and not buffer.is_inference()
    ]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, version, value in buffers:
                if buffer._version != version:
                    buffer.copy_(value)
                elif _may_be_statistics(buffer):
                    buffer.data.copy_(value)  # keeps the version: earlier graphs stay valid
                if module._buffers.get(name) is not buffer:  # replaced rather than written to
                    module._buffers[name] = buffer


def _may_be_statistics(buffer: Tensor) -> bool:
    """Batch norms update their running statistics without incrementing the version."""
    strided = buffer.layout == torch.strided
    return strided and buffer.is_floating_point() and buffer.is_contiguous()
