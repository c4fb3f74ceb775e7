"""The quantizer in torch: what kernel.c does, in the same order, so that both give the same bits.

Used where the kernel could not be built and on other devices; on CUDA it is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dat.comm.message import FLOAT, Message, Run

MASK = 0xFFFFFFFF
WEYL = 0x9E3779B9
TILE = 512
LANES = 8
TINY = 2.0**-100
LARGEST = torch.finfo(torch.float32).max


def measure(x: Tensor, layout: Message, levels: int, norm: str, message: Tensor) -> None:
    """The steps of a message, and its floats."""
    for run in layout.runs:
        values = x[run.start : run.start + run.length]
        place = message[run.floats : run.floats + FLOAT * (run.groups or run.length)]
        place.copy_(_bytes(_steps(values, run.group, levels, norm) if run.group else values))


def encode(
    x: Tensor,
    layout: Message,
    *,
    bits: int,
    levels: int,
    norm: str,
    random: bool,
    key: int,
    message: Tensor,
) -> None:
    """A message of some runs of x. With norm `given` its steps and floats are there already."""
    if norm != "given":
        measure(x, layout, levels, norm, message)
    for run in layout.runs:
        if run.group:
            steps = _floats(message, run.floats, run.groups)
            values = _grouped(x[run.start : run.start + run.length], run)
            code = _compiled(_codes, x.device)(
                values, steps, run.position, bits, levels, random, key
            )
            packed = _pack(code.flatten()[: run.length], bits)
            message[run.codes : run.codes + len(packed)] = packed


def decode(message: Tensor, layout: Message, *, bits: int, mode: str, out: Tensor) -> None:
    """out = message (`set`), out += message (`add`) or out -= message (`subtract`)."""
    for run in layout.runs:
        place = out[run.start : run.start + run.length]
        if run.group:
            steps = _floats(message, run.floats, run.groups)
            count = -(-run.length * bits // 8)
            code = _unpack(message[run.codes : run.codes + count], run.length, bits)
            values = _compiled(_values, out.device)(_grouped(code, run), steps)
            values = values.flatten()[: run.length]
        else:
            values = _floats(message, run.floats, run.length)
        if mode == "set":
            place.copy_(values)
        else:
            place.add_(values) if mode == "add" else place.sub_(values)


def _steps(x: Tensor, group: int, levels: int, norm: str) -> Tensor:
    """One step a group, rounded up, so that no value lies beyond the highest level."""
    measured = _largest(x, group) if norm == "max" else _length(x, group)
    exact = measured / levels
    step = exact.clamp(max=LARGEST).float()
    up = torch.nextafter(step, torch.full_like(step, torch.inf))
    step = torch.where(step.double() < exact.clamp(max=LARGEST), up, step)
    return torch.where(measured.isfinite(), step, torch.inf)


def _largest(x: Tensor, group: int) -> Tensor:
    padded = _padded(x.abs(), group).view(-1, group)
    return padded.double().nan_to_num(nan=torch.inf, posinf=torch.inf).amax(1)


def _length(x: Tensor, group: int) -> Tensor:
    """The L2 norm of every group: lanes of a tile, then tiles; cumsum is a sum in a fixed order."""
    rows = _padded(x.double().square(), group).view(-1, group)
    tile = TILE if group > TILE else group + -group % LANES
    tiles = torch.nn.functional.pad(rows, (0, -group % tile)).view(len(rows), -1, tile)
    lanes = tiles.unflatten(2, (-1, LANES)).cumsum(2)[:, :, -1]
    a, b, c, d, e, f, g, h = lanes.unbind(-1)
    sums = ((a + e) + (c + g)) + ((b + f) + (d + h))
    length: Tensor = sums.cumsum(1)[:, -1].sqrt()
    return length


def _codes(
    x: Tensor, steps: Tensor, start: int, bits: int, levels: int, random: bool, key: int
) -> Tensor:
    """Every value in units of its group's step, rounded."""
    broken = steps.isinf().unsqueeze(1)
    tiny = steps < TINY
    step = torch.where(tiny, steps * 2.0**100, steps)
    inverse = torch.where(step > 0, 1.0 / step, 0.0).unsqueeze(1)
    raised = torch.where(tiny.unsqueeze(1), x * 2.0**100, x)
    v = raised * inverse
    position = torch.arange(x.numel(), device=x.device).view_as(x) + start
    drawn = _mix((key + position * WEYL) & MASK, key >> 32)
    if bits == 16:
        v = v.clamp(-levels, levels)
        uniform = (drawn >> 8).float() * 2.0**-24 if random else 0.5
        floor = v.floor()
        code = floor.int() + (uniform < v - floor).int()
    else:
        places = 23 - bits
        zero = torch.tensor(1.5 * 2**bits, device=x.device).view(torch.int32)
        bits_drawn = drawn >> (32 - places) if random else torch.full_like(drawn, 1 << (places - 1))
        dither = (zero | bits_drawn.int()).view(torch.float32)
        code = ((dither + v).view(torch.int32) - zero) >> places
    return torch.where(broken, (~x.isfinite()).int(), code)


def _values(code: Tensor, steps: Tensor) -> Tensor:
    step = steps.unsqueeze(1)
    broken = torch.where(code != 0, torch.nan, 0.0)
    return torch.where(step.isinf(), broken, code.float() * step)


def _mix(weyl: Tensor, high: int) -> Tensor:
    """32 random bits, held in int64; a product that wraps keeps its low half."""
    x = weyl ^ (weyl >> 16)
    x = (x * 0x7FEB352D) & MASK
    x = x ^ (x >> 15)
    x = (x + high) & MASK
    return (x * 0x846CA68B) & MASK


def _pack(code: Tensor, bits: int) -> Tensor:
    if bits == 16:
        return _bytes(code.to(torch.int16))
    if bits == 8:
        return _bytes(code.to(torch.int8))
    places = torch.arange(8, device=code.device) * bits
    eights = _padded(code.long() & (2**bits - 1), 8).view(-1, 8)
    words = (eights << places).sum(1, keepdim=True)
    whole = (words >> torch.arange(0, 8 * bits, 8, device=code.device)) & 0xFF
    packed: Tensor = whole.to(torch.uint8).flatten()[: -(-len(code) * bits // 8)]
    return packed


def _unpack(packed: Tensor, length: int, bits: int) -> Tensor:
    if bits == 16:
        return packed.clone().view(torch.int16).int()
    if bits == 8:
        return packed.view(torch.int8).int()
    groups = _padded(packed.long(), bits).view(-1, bits)
    words = (groups << torch.arange(0, 8 * bits, 8, device=packed.device)).sum(1, keepdim=True)
    code = (words >> (torch.arange(8, device=packed.device) * bits)) & (2**bits - 1)
    sign = 1 << (bits - 1)
    signed: Tensor = ((code ^ sign) - sign).flatten()[:length].int()
    return signed


def _grouped(x: Tensor, run: Run) -> Tensor:
    """One row a group; the last one is filled up with zeros."""
    return _padded(x, run.group).view(run.groups, run.group)


def _padded(x: Tensor, multiple: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -len(x) % multiple))


def _floats(message: Tensor, start: int, count: int) -> Tensor:
    return message[start : start + FLOAT * count].clone().view(torch.float32)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@cache
def _compiler(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
    return compiled


def _compiled(function: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    """On CUDA one kernel instead of thirty."""
    return _compiler(function) if device.type == "cuda" else function
