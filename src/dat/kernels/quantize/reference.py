"""The quantizer in torch: the operations of kernel.c in the same order, so that both give the same
bits.

Used where neither kernel.c nor the Triton kernels can run. It is not compiled: torch.compile
divides by approximate reciprocals on GPUs and fuses multiplications with additions, which gives
other bits, and it needs Triton as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dat.core import devices
from dat.kernels.quantize.layout import FLOAT, MessageLayout, Run

MASK = 0xFFFFFFFF
WEYL = 0x9E3779B9
TILE = 512
LANES = 8
TINY = 2.0**-100
HUGE = 2.0**126
FEW = 64
"""Up to this many terms are added one by one on an accelerator."""
LARGEST = torch.finfo(torch.float32).max


def measure(x: Tensor, layout: MessageLayout, levels: int, norm: str, message: Tensor) -> None:
    """Write the step sizes and the float32 values of a message."""
    for run in layout.runs:
        values = x[run.start : run.start + run.length]
        target = message[run.floats : run.floats + FLOAT * (run.groups or run.length)]
        target.copy_(_bytes(_steps(values, run.group, levels, norm) if run.group else values))


def encode(
    x: Tensor,
    layout: MessageLayout,
    *,
    bits: int,
    levels: int,
    norm: str,
    random: bool,
    key: int,
    message: Tensor,
) -> None:
    """Write the message that encodes `x`. With norm `given`, the message already holds its step
    sizes and float32 values."""
    if norm != "given":
        measure(x, layout, levels, norm, message)
    for run in layout.runs:
        if run.group:
            steps = _floats(message, run.floats, run.groups)
            values = _grouped(x[run.start : run.start + run.length], run)
            code = _codes(values, steps, run.position, bits, levels, random, key)
            packed = _pack(code.flatten()[: run.length], bits)
            message[run.codes : run.codes + len(packed)] = packed


def decode(message: Tensor, layout: MessageLayout, *, bits: int, mode: str, out: Tensor) -> None:
    """out = message (`set`), out += message (`add`) or out -= message (`subtract`)."""
    for run in layout.runs:
        target = out[run.start : run.start + run.length]
        if run.group:
            steps = _floats(message, run.floats, run.groups)
            count = -(-run.length * bits // 8)
            code = _unpack(message[run.codes : run.codes + count], run.length, bits)
            values = _values(_grouped(code, run), steps).flatten()[: run.length]
        else:
            values = _floats(message, run.floats, run.length)
        if mode == "set":
            target.copy_(values)
        else:
            target.add_(values) if mode == "add" else target.sub_(values)


def _steps(x: Tensor, group: int, levels: int, norm: str) -> Tensor:
    """One step size per group, rounded up, so that no value exceeds the highest level."""
    norms = _max_norm(x, group) if norm == "max" else _l2_norm(x, group)
    # torch divides by a number on the host as a product with its reciprocal on GPUs
    exact = norms / torch.full_like(norms, levels)
    step = exact.clamp(max=LARGEST).float()
    up = torch.nextafter(step, torch.full_like(step, torch.inf))
    step = torch.where(step.double() < exact.clamp(max=LARGEST), up, step)
    return torch.where(norms.isfinite(), step, torch.inf)


def _max_norm(x: Tensor, group: int) -> Tensor:
    padded = _padded(x.abs(), group).view(-1, group)
    return padded.double().nan_to_num(nan=torch.inf, posinf=torch.inf).amax(1)


def _l2_norm(x: Tensor, group: int) -> Tensor:
    """Sums over the lanes of a tile, then over tiles."""
    rows = _padded(x.double().square(), group).view(-1, group)
    tile = TILE if group > TILE else group + -group % LANES
    tiles = torch.nn.functional.pad(rows, (0, -group % tile)).view(len(rows), -1, tile)
    lanes = _sum_in_order(tiles.unflatten(2, (-1, LANES)).movedim(2, -1))
    a, b, c, d, e, f, g, h = lanes.unbind(-1)
    return _sum_in_order(((a + e) + (c + g)) + ((b + f) + (d + h))).sqrt()


def _sum_in_order(x: Tensor) -> Tensor:
    """Sums over the last dimension, from the first term to the last.

    `cumsum` adds in this order on the CPU, but not on GPUs: many terms are added on the CPU.
    """
    total: Tensor
    if devices.is_accelerator(x.device) and x.shape[-1] <= FEW:
        total = x[..., 0]
        for i in range(1, x.shape[-1]):
            total = total + x[..., i]
        return total
    total = x.cpu().cumsum(-1)[..., -1]
    return total.to(x.device)


def _codes(
    x: Tensor, steps: Tensor, start: int, bits: int, levels: int, random: bool, key: int
) -> Tensor:
    """Every value in units of its group's step size, rounded."""
    broken = steps.isinf().unsqueeze(1)
    scale = torch.ones_like(steps).masked_fill_(steps < TINY, 2.0**100)
    scale.masked_fill_(steps > HUGE, 0.25)
    step = steps * scale
    inverse = torch.where(step > 0, 1.0 / step, 0.0)
    v = (x * scale.unsqueeze(1) * inverse.unsqueeze(1)).clamp(-levels, levels)
    position = torch.arange(x.numel(), device=x.device).view_as(x) + start
    drawn = _mix((key + position * WEYL) & MASK, key >> 32)
    if bits == 16:
        uniform = (drawn >> 8).float() * 2.0**-24 if random else 0.5
        floor = v.floor()
        code = floor.int() + (uniform < v - floor).int()
    else:
        fraction_bits = 23 - bits
        zero = torch.full((), 1.5 * 2**bits, device=x.device).view(torch.int32)
        half = 1 << (fraction_bits - 1)
        dither_bits = drawn >> (32 - fraction_bits) if random else torch.full_like(drawn, half)
        dither = (zero | dither_bits.int()).view(torch.float32)
        code = ((dither + v).view(torch.int32) - zero) >> fraction_bits
    return torch.where(broken, (~x.isfinite()).int(), code)


def _values(code: Tensor, steps: Tensor) -> Tensor:
    step = steps.unsqueeze(1)
    broken = torch.where(code != 0, torch.nan, 0.0)
    return torch.where(step.isinf(), broken, code.float() * step)


def _mix(weyl: Tensor, high: int) -> Tensor:
    """32 random bits in an int64; a product that overflows keeps its low half."""
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
    shifts = torch.arange(8, device=code.device) * bits
    eights = _padded(code.long() & (2**bits - 1), 8).view(-1, 8)
    words = (eights << shifts).sum(1, keepdim=True)
    octets = (words >> torch.arange(0, 8 * bits, 8, device=code.device)) & 0xFF
    packed: Tensor = octets.to(torch.uint8).flatten()[: -(-len(code) * bits // 8)]
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
    """One row per group; the last row is padded with zeros."""
    return _padded(x, run.group).view(run.groups, run.group)


def _padded(x: Tensor, multiple: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -len(x) % multiple))


def _floats(message: Tensor, start: int, count: int) -> Tensor:
    return message[start : start + FLOAT * count].clone().view(torch.float32)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
