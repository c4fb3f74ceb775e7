"""kernel.c, where the installation could compile it: a step of many layers in one call on the CPU.

It takes layers of floats that lie densely in memory, in torch's usual order or channels-last. Other
layers, and all where there is no kernel, are left to torch's foreach functions; up to rounding, the
result is the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dat import native

VERSION = 1
"""Of what is handed over; kernel.c has the same."""
BLOCK = 16384
"""Values that are summed by themselves; kernel.c has the same."""
ADAM, MOMENTUM, CLASSIC = range(3)
NAMES = {ADAM: ("m", "v"), MOMENTUM: ("m",), CLASSIC: ("v",)}
"""Of the moments in a parameter's state."""


@dataclass(frozen=True, kw_only=True)
class Moments:
    """How the moments move; what a kind has no use for stays as it is."""

    kind: int
    first: float = 0.0
    """What the gradient adds to the first moment: 1 - beta1."""
    keep: float = 0.0
    """What stays of the second moment, or of classic LARS's momentum."""
    second: float = 0.0
    """What the squared gradient adds to the second moment: 1 - beta2."""
    denominators: Sequence[tuple[float, float]] = ()
    """Of each layer, where u is m / (sqrt(v) * the one + the other) + weight_decay * theta."""


class _Rule(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_double) for name in ("lr", "weight_decay", "c_l", "c_u", "trust")),
        *((name, ctypes.c_double) for name in ("first", "keep", "second")),
        *((name, ctypes.c_int32) for name in ("kind", "adapt")),
    )


def library() -> ctypes.CDLL | None:
    return native.load("dat.optim._kernel", VERSION)


def takes(param: Tensor) -> bool:
    """Whether `update` can do it."""
    grad = param.grad
    return (
        library() is not None
        and grad is not None
        and type(param) in (Tensor, nn.Parameter)  # others may keep their values elsewhere
        and type(grad) is Tensor
        and param.device.type == "cpu"
        and param.dtype == grad.dtype == torch.float32
        and _order(param) is not None
    )


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
    """Move moments and parameters; the trust ratios, if there are any.

    `bounds` are c_l and c_u, or classic LARS's trust coefficient. Gradients in another order than
    their parameter are copied; so are moments, but only once, as they stay in that order.
    """
    rule = _Rule(lr=lr, weight_decay=weight_decay, adapt=adapt, kind=moments.kind, **bounds)
    rule.first, rule.keep, rule.second = moments.first, moments.keep, moments.second
    layers, kept, blocks = [], [], 0
    for param, grad, state in zip(params, grads, states, strict=True):
        order = _order(param)
        assert order is not None
        tensors = [grad.contiguous(memory_format=order)]
        for name in NAMES[moments.kind]:
            state[name] = state[name].contiguous(memory_format=order)
            tensors.append(state[name])
        pointers = [param.data_ptr(), *(tensor.data_ptr() for tensor in tensors), 0]
        layers += [*pointers[:4], param.numel()]
        kept.append(tensors[0])  # until the call is over
        blocks += -(-param.numel() // BLOCK)
    sums, ratios = torch.empty(2 * blocks, dtype=torch.float64), torch.empty(len(params))
    denominators = list(chain.from_iterable(moments.denominators))
    kernel = library()
    assert kernel is not None
    kernel.dat_update(
        ctypes.byref(rule),
        (ctypes.c_int64 * len(layers))(*layers),
        (ctypes.c_double * len(denominators))(*denominators),
        *(ctypes.c_int64(len(params)), ctypes.c_void_p(sums.data_ptr())),
        *(ctypes.c_void_p(ratios.data_ptr()), torch.get_num_threads()),
    )
    torch.autograd.graph.increment_version(params)  # as if torch had changed them itself
    return ratios if adapt else None


def _order(tensor: Tensor) -> torch.memory_format | None:
    """In which order its values fill a stretch of memory; none if they do not."""
    if tensor.is_contiguous():
        return torch.contiguous_format
    if tensor.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return None
