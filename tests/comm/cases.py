"""Gradients, layouts and quantizers for the tests of messages."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from dat.comm.kernel import Codec
from dat.comm.message import FLOAT, Message, Slot, compose, spans
from dat.comm.quantizer import BITS, DENSE, QUANTIZERS, Buckets, Quantizer
from dat.rng import generator

FEW_BITS = tuple(bits for bits in BITS if bits != DENSE)
KEY = 0x1234_5678_9ABC_DEF0


@cache
def quantizers(bits: int, rounding: str = "random") -> dict[str, Quantizer]:
    """Every quantizer of the registry, and buckets by both norms and of several sizes."""
    made = {name: kind(bits=bits, rounding=rounding) for name, kind in QUANTIZERS.items()}
    for norm in ("max", "l2"):
        for size in (8, 64, 512, 1024):
            made[f"{norm}-{size}"] = Buckets(bits=bits, rounding=rounding, norm=norm, size=size)
    return made


def slots_of(*shapes: tuple[int, ...]) -> list[Slot]:
    """The tensors of a gradient, one after the other."""
    slots, position = [], 0
    for shape in shapes:
        slots.append(Slot(shape, position))
        position += slots[-1].length
    return slots


def layout_of(quantizer: Quantizer, *shapes: tuple[int, ...]) -> Message:
    """One message with all of them."""
    return compose(spans(slots_of(*shapes), quantizer), quantizer.bits)


def normal(length: int, *, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Normal numbers; the product is taken in double, so that a tiny scale is no trouble."""
    draws = torch.randn(length, generator=generator(seed, "gradient"), dtype=torch.float64)
    return (scale * draws).float()


def bits_of(x: Tensor) -> Tensor:
    """To compare bit for bit; one NaN is as good as another."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


def encoded(codec: Codec, x: Tensor, layout: Message, key: int = KEY) -> Tensor:
    message = torch.zeros(layout.size, dtype=torch.uint8)
    codec.encode(x, layout, message, key)
    return message


def decoded(codec: Codec, message: Tensor, layout: Message, length: int) -> Tensor:
    out = torch.zeros(length)
    codec.decode(message, layout, out)
    return out


def steps_of(message: Tensor, layout: Message) -> Tensor:
    return message[: FLOAT * layout.steps].clone().view(torch.float32)


def step_of_each_value(message: Tensor, layout: Message, length: int) -> Tensor:
    """In double; 0 where a value is sent as a float."""
    steps, each = steps_of(message, layout).double(), torch.zeros(length, dtype=torch.float64)
    for run in layout.runs:
        if run.group:
            first = run.floats // FLOAT
            spread = steps[first : first + run.groups].repeat_interleave(run.group)
            each[run.start : run.start + run.length] = spread[: run.length]
    return each
