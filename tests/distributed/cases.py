"""Gradients, layouts and quantizers for the tests of the wire format."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from dat.core.rng import generator
from dat.distributed.quantizers import BITS, DENSE, QUANTIZERS, Buckets, Quantizer
from dat.distributed.wire_format import Slot, message_layout, spans
from dat.kernels.quantize.codec import Codec
from dat.kernels.quantize.layout import FLOAT, MessageLayout

FEW_BITS = tuple(bits for bits in BITS if bits != DENSE)
KEY = 0x1234_5678_9ABC_DEF0


@cache
def quantizers(bits: int, rounding: str = "random") -> dict[str, Quantizer]:
    """Every registered quantizer, and buckets with both norms and of several sizes."""
    cases = {name: cls(bits=bits, rounding=rounding) for name, cls in QUANTIZERS.items()}
    for norm in ("max", "l2"):
        for size in (8, 64, 512, 1024):
            cases[f"{norm}-{size}"] = Buckets(bits=bits, rounding=rounding, norm=norm, size=size)
    return cases


def slots_of(*shapes: tuple[int, ...]) -> list[Slot]:
    """The slots of consecutive tensors of a gradient."""
    slots, position = [], 0
    for shape in shapes:
        slots.append(Slot(shape, position))
        position += slots[-1].length
    return slots


def layout_of(quantizer: Quantizer, *shapes: tuple[int, ...]) -> MessageLayout:
    """The layout of one message with tensors of these shapes."""
    return message_layout(spans(slots_of(*shapes), quantizer), quantizer.bits)


def normal(length: int, *, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Normally distributed float32 values; scaled in double precision, for tiny scales."""
    draws = torch.randn(length, generator=generator(seed, "gradient"), dtype=torch.float64)
    return (scale * draws).float()


def bits_of(x: Tensor) -> Tensor:
    """The bits of float32 values, for exact comparison; all NaNs are equal."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


def encoded(codec: Codec, x: Tensor, layout: MessageLayout, key: int = KEY) -> Tensor:
    message = torch.zeros(layout.size, dtype=torch.uint8)
    codec.encode(x, layout, message, key)
    return message


def decoded(codec: Codec, message: Tensor, layout: MessageLayout, length: int) -> Tensor:
    out = torch.zeros(length)
    codec.decode(message, layout, out)
    return out


def steps_of(message: Tensor, layout: MessageLayout) -> Tensor:
    return message[: FLOAT * layout.steps].clone().view(torch.float32)


def step_of_each_value(message: Tensor, layout: MessageLayout, length: int) -> Tensor:
    """The step size of each value, in double precision; 0 if it is sent as float32."""
    steps, result = steps_of(message, layout).double(), torch.zeros(length, dtype=torch.float64)
    for run in layout.runs:
        if run.group:
            first = run.floats // FLOAT
            repeated = steps[first : first + run.groups].repeat_interleave(run.group)
            result[run.start : run.start + run.length] = repeated[: run.length]
    return result
