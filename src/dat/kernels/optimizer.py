"""One optimizer step for many layers in one call: the binding of optimizer.c for the CPU, and of
the Triton kernels for GPUs, which give the same bits.

They support dense float32 layers, contiguous or channels-last. All other layers, and every layer if
there is no kernel, are left to torch's foreach functions; the results agree up to rounding.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

from dat.core import devices
from dat.core.lazy import nn, torch
from dat.kernels import native

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1
"""The version of the interface; optimizer.c has the same."""
BLOCK = 16384
"""The number of values that are summed as one block; optimizer.c has the same."""
ADAM, MOMENTUM, CLASSIC = range(3)
STATE_NAMES = {ADAM: ("m", "v"), MOMENTUM: ("m",), CLASSIC: ("v",)}
"""The names of the moments in a parameter's state."""


@dataclass(frozen=True, kw_only=True)
class Moments:
    """The update rule of the moments; each kind uses some of the fields."""

    kind: int
    first: float = 0.0
    """The weight of the gradient in the first moment: 1 - beta1."""
    keep: float = 0.0
    """The decay of the second moment, or of classic LARS's momentum."""
    second: float = 0.0
    """The weight of the squared gradient in the second moment: 1 - beta2."""
    denominators: Sequence[tuple[float, float]] = ()
    """(a, b) for each layer, where u = m / (sqrt(v) * a + b) + weight_decay * theta."""


class _Rule(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_double) for name in ("lr", "weight_decay", "c_l", "c_u", "trust")),
        *((name, ctypes.c_double) for name in ("first", "keep", "second")),
        *((name, ctypes.c_int32) for name in ("kind", "adapt")),
    )


def library() -> ctypes.CDLL | None:
    return native.load("dat.kernels._optimizer", VERSION)


@cache
def triton_update(device: torch.device) -> Callable[..., None] | None:
    """The update in Triton; None on the CPU, and where Triton is missing."""
    if os.environ.get("DAT_NO_KERNEL") or not devices.supports_triton(device):
        return None
    try:
        module = importlib.import_module("dat.kernels.optimizer_triton_launch")
    except ImportError:
        return None  # foreach is nearly as fast, and needs no warning
    update: Callable[..., None] = module.update
    return update


def supports(param: Tensor) -> bool:
    """Whether `update` can handle this parameter."""
    grad = param.grad
    return (
        grad is not None
        and type(param) in (torch.Tensor, nn.Parameter)  # subclasses may store values elsewhere
        and type(grad) is torch.Tensor
        and param.dtype == grad.dtype == torch.float32
        and _memory_format(param) is not None
        and _has_kernel(param.device)
    )


def _has_kernel(device: torch.device) -> bool:
    on_gpu = devices.is_accelerator(device)
    return (triton_update(device) if on_gpu else library()) is not None


def update(
    moments: Moments,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Any]],
    *,
    lr: float,
    weight_decay: float,
    adapt: bool,
    **bounds: float,
) -> Tensor | None:
    """Update moments and parameters in place; return the trust ratios, or None without `adapt`.

    `bounds` are c_l and c_u, or classic LARS's trust coefficient. Gradients whose memory format
    differs from their parameter's are copied. So are moments, but only once: the copy replaces
    them in the state.
    """
    layers = _layers(moments, params, grads, states)
    ratios = torch.empty(len(params), device=params[0].device)
    options = {"lr": lr, "weight_decay": weight_decay, "adapt": adapt, **bounds}
    if devices.is_accelerator(params[0].device):
        in_triton = triton_update(params[0].device)
        assert in_triton is not None
        in_triton(moments, layers, ratios, **options)
    else:
        _update_natively(moments, layers, ratios, **options)
    torch.autograd.graph.increment_version(params)  # as an in-place operation of torch would
    return ratios if adapt else None


def _layers(
    moments: Moments,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Any]],
) -> list[list[Tensor]]:
    """For each layer its parameter, gradient and moments, with the same order in memory."""
    layers = []
    for param, grad, state in zip(params, grads, states, strict=True):
        memory_format = _memory_format(param)
        assert memory_format is not None
        tensors = [param, grad.contiguous(memory_format=memory_format)]
        for name in STATE_NAMES[moments.kind]:
            state[name] = state[name].contiguous(memory_format=memory_format)
            tensors.append(state[name])
        layers.append(tensors)
    return layers


def _update_natively(
    moments: Moments, layers: Sequence[Sequence[Tensor]], ratios: Tensor, **options: float
) -> None:
    rule = _Rule(kind=moments.kind, **options)
    rule.first, rule.keep, rule.second = moments.first, moments.keep, moments.second
    table, blocks = [], 0
    for tensors in layers:
        pointers = [*(tensor.data_ptr() for tensor in tensors), 0]
        table += [*pointers[:4], tensors[0].numel()]
        blocks += -(-tensors[0].numel() // BLOCK)
    sums = torch.empty(2 * blocks, dtype=torch.float64)
    denominators = list(chain.from_iterable(moments.denominators))
    kernel = library()
    assert kernel is not None
    kernel.dat_update(
        ctypes.byref(rule),
        (ctypes.c_int64 * len(table))(*table),
        (ctypes.c_double * len(denominators))(*denominators),
        *(ctypes.c_int64(len(layers)), ctypes.c_void_p(sums.data_ptr())),
        *(ctypes.c_void_p(ratios.data_ptr()), torch.get_num_threads()),
    )


def _memory_format(tensor: Tensor) -> torch.memory_format | None:
    """The memory format of a dense tensor; None for any other."""
    if tensor.is_contiguous():
        return torch.contiguous_format
    if tensor.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return None
