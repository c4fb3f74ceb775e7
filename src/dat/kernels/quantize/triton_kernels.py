"""The quantizer in Triton, for GPUs: the operations of kernel.c in the same order, for the same
bits. `triton_launch.py` calls these kernels.

A program works on a block of consecutive values, tiles or groups of one run. `blocks` holds, for
each program, the row of its run in the table `runs` and the index of its first item. Messages are
read and written byte by byte, as they need not be aligned. Bits depend on exact division (`div_rn`)
and on products that are not fused with sums (the launch option `enable_fp_fusion=False`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

COLUMNS = tl.constexpr(7)
"""Columns of `runs`: the fields of `layout.Run`, and the number of tiles of the runs before."""
TILE = tl.constexpr(512)
INFINITE = tl.constexpr(0x7F800000)
LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def measure_tiles(x, runs, blocks, parts, L2: tl.constexpr, TILES: tl.constexpr):
    """Write the largest magnitude or the sum of squares of each tile; lanes are added as in
    kernel.c. A tile ends at the end of its group."""
    program = blocks + 2 * tl.program_id(0).to(tl.int64)
    run = runs + COLUMNS * tl.load(program)
    start, length, group = tl.load(run), tl.load(run + 1), tl.load(run + 2)
    tiles_per_group = (group + TILE - 1) // TILE
    tile = tl.load(program + 1) + tl.arange(0, TILES)
    number = tile // tiles_per_group
    begin = number * group + tile % tiles_per_group * TILE
    end = tl.minimum(tl.minimum(begin + TILE, (number + 1) * group), length)
    lane = begin[:, None] + tl.arange(0, 8)[None, :]
    values, left = x + start + lane, end[:, None] - lane
    lanes = tl.full((TILES, 8), 0, tl.float64 if L2 else tl.int32)
    for i in range(0, tl.minimum(tl.minimum(group, length), TILE), 8):
        value = tl.load(values + i, mask=i < left, other=0.0)
        if L2:
            lanes += value.to(tl.float64) * value.to(tl.float64)
        else:  # without their sign, the bits of floats sort like the floats, NaN last
            lanes = tl.maximum(lanes, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    for width in tl.static_range(2):  # lanes 0 and 4, 1 and 5, ...; then these
        halves = tl.reshape(lanes, (TILES, 2, 4 >> width))
        low, high = tl.split(tl.trans(halves, (0, 2, 1)))
        lanes = low + high if L2 else tl.maximum(low, high)
    low, high = tl.split(lanes)
    if L2:
        measure = low + high
    else:
        bits = tl.maximum(low, high)
        finite = tl.where(bits < INFINITE, bits, 0).to(tl.float32, bitcast=True)
        measure = tl.where(bits < INFINITE, finite.to(tl.float64), float("inf"))
    groups = (length + group - 1) // group
    parts += tl.load(run + 6)
    tl.store(parts + tile, measure, mask=tile < groups * tiles_per_group)


@triton.jit(do_not_specialize=["levels"])
def write_steps(parts, runs, blocks, message, levels, L2: tl.constexpr, GROUPS: tl.constexpr):
    """Combine the tiles of each group in order, and write its step size, rounded up."""
    program = blocks + 2 * tl.program_id(0).to(tl.int64)
    run = runs + COLUMNS * tl.load(program)
    length, group, floats = tl.load(run + 1), tl.load(run + 2), tl.load(run + 3)
    tiles_per_group = (group + TILE - 1) // TILE
    number = tl.load(program + 1) + tl.arange(0, GROUPS)
    exists = number < (length + group - 1) // group
    first = parts + tl.load(run + 6) + number * tiles_per_group
    total = tl.full((GROUPS,), 0, tl.float64)
    for i in range(tiles_per_group):
        part = tl.load(first + i, mask=exists, other=0.0)
        total = total + part if L2 else tl.where(part > total, part, total)
    measure = tl.sqrt(total) if L2 else total
    finite = measure < float("inf")
    exact = tl.where(finite, measure, 0.0) / levels.to(tl.float64)
    exact = tl.minimum(exact, LARGEST)
    step = exact.to(tl.float32)
    bits = step.to(tl.int32, bitcast=True) + (step.to(tl.float64) < exact).to(tl.int32)
    bits = tl.where(finite, bits, INFINITE)
    octet = tl.arange(0, 4)[None, :]
    to = message + floats + 4 * number[:, None] + octet
    tl.store(to, (bits[:, None] >> (8 * octet)).to(tl.uint8), mask=exists[:, None])


@triton.jit
def write_floats(x, runs, blocks, message, VALUES: tl.constexpr):
    """Copy the runs that are sent as float32."""
    program = blocks + 2 * tl.program_id(0).to(tl.int64)
    run = runs + COLUMNS * tl.load(program)
    start, length, floats = tl.load(run), tl.load(run + 1), tl.load(run + 3)
    i = tl.load(program + 1) + tl.arange(0, VALUES)
    inside = i < length
    bits = tl.load(x + start + i, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    octet = tl.arange(0, 4)[None, :]
    to = message + floats + 4 * i[:, None] + octet
    tl.store(to, (bits[:, None] >> (8 * octet)).to(tl.uint8), mask=inside[:, None])


@triton.jit
def load_floats(bytes, mask):
    """Four bytes each as float32; the addresses need not be aligned."""
    bits = tl.load(bytes, mask=mask, other=0).to(tl.uint32)
    for octet in tl.static_range(1, 4):
        bits |= tl.load(bytes + octet, mask=mask, other=0).to(tl.uint32) << (8 * octet)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def random_bits(weyl, high):
    """32 random bits, as `mix` in kernel.c draws them."""
    x = weyl ^ (weyl >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x + high
    return x * 0x846CA68B


@triton.jit(do_not_specialize=["levels", "key_low", "key_high"])
def write_codes(
    x,
    runs,
    blocks,
    message,
    levels,
    key_low,
    key_high,
    BITS: tl.constexpr,
    RANDOM: tl.constexpr,
    EIGHTS: tl.constexpr,
):
    """Round the values to codes and pack them; the message holds the step sizes. A group starts at
    a multiple of eight values, and eight codes fill whole bytes."""
    program = blocks + 2 * tl.program_id(0).to(tl.int64)
    run = runs + COLUMNS * tl.load(program)
    start, length, group = tl.load(run), tl.load(run + 1), tl.load(run + 2)
    floats, codes, position = tl.load(run + 3), tl.load(run + 4), tl.load(run + 5)
    eight = tl.load(program + 1) + tl.arange(0, EIGHTS)
    step = load_floats(message + floats + 8 * eight // group * 4, 8 * eight < length)
    broken = (step == float("inf"))[:, None]
    # keeps the inverse from overflowing or losing digits; does not change the quotient
    scale = tl.where(step < 2.0**-100, 2.0**100, tl.where(step > 2.0**126, 0.25, 1.0))
    step = step * scale
    inverse = tl.where(step > 0, tl.div_rn(1.0, tl.where(step > 0, step, 1.0)), 0.0)

    column = tl.arange(0, 8)[None, :]
    i = 8 * eight[:, None] + column
    inside = i < length
    value = tl.load(x + start + i, mask=inside, other=0.0)
    v = value * scale[:, None] * inverse[:, None]
    top = levels.to(tl.float32)
    v = tl.minimum(tl.maximum(v, -top), top)  # no rounding error may overflow a code
    weyl = key_low.to(tl.uint32, bitcast=True) + (position + i).to(tl.uint32) * 0x9E3779B9
    drawn = random_bits(weyl, key_high.to(tl.uint32, bitcast=True))
    if BITS == 16:
        code = v.to(tl.int32)  # not `floor`, which takes subnormals for zero
        code -= (code.to(tl.float32) > v).to(tl.int32)
        uniform = (drawn >> 8).to(tl.float32) * (2.0**-24) if RANDOM else 0.5
        code += (uniform < v - code.to(tl.float32)).to(tl.int32)
    else:
        FRACTION: tl.constexpr = 23 - BITS
        ZERO: tl.constexpr = ((127 + BITS) << 23) + (1 << 22)  # the bits of 1.5 * 2^BITS
        if RANDOM:
            dither = (drawn >> (32 - FRACTION)).to(tl.int32) | ZERO
        else:
            dither = tl.full((EIGHTS, 8), ZERO + (1 << (FRACTION - 1)), tl.int32)
        total = dither.to(tl.float32, bitcast=True) + v
        code = (total.to(tl.int32, bitcast=True) - ZERO) >> FRACTION
    not_finite = (value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= INFINITE
    code = tl.where(broken, not_finite.to(tl.int32), code)

    if BITS == 16:
        to = message + codes + 2 * i
        tl.store(to, code.to(tl.uint8), mask=inside)
        tl.store(to + 1, (code >> 8).to(tl.uint8), mask=inside)
    else:
        word = (tl.where(inside, code, 0) & ((1 << BITS) - 1)).to(tl.uint64)
        word = word << (BITS * column).to(tl.uint64)
        for width in tl.static_range(3):  # merges eight codes in pairs
            low, high = tl.split(tl.reshape(word, (EIGHTS, 4 >> width, 2)))
            word = low | high
        word = tl.reshape(word, (EIGHTS, 1))
        octet = BITS * eight[:, None] + column
        used = (column < BITS) & (octet < (length * BITS + 7) // 8)
        octets = (word >> (8 * column).to(tl.uint64)).to(tl.uint8)
        tl.store(message + codes + octet, octets, mask=used)


@triton.jit(do_not_specialize=["count", "stride"])
def read_codes(
    messages,
    count,
    stride,
    runs,
    blocks,
    out,
    BITS: tl.constexpr,
    MODE: tl.constexpr,
    EIGHTS: tl.constexpr,
):
    """Unpack and scale the codes of one message after the other: set `out` to the first one, add it
    or subtract it, as MODE says, and add the others."""
    program = blocks + 2 * tl.program_id(0).to(tl.int64)
    run = runs + COLUMNS * tl.load(program)
    start, length, group = tl.load(run), tl.load(run + 1), tl.load(run + 2)
    floats, codes = tl.load(run + 3), tl.load(run + 4)
    eight = tl.load(program + 1) + tl.arange(0, EIGHTS)
    column = tl.arange(0, 8)[None, :]
    i = 8 * eight[:, None] + column
    inside = i < length
    total = tl.full((EIGHTS, 8), 0, tl.float32)
    if MODE != "set":
        total = tl.load(out + start + i, mask=inside, other=0.0)
    for k in range(count):
        message = messages + k * stride.to(tl.int64)
        step = load_floats(message + floats + 8 * eight // group * 4, 8 * eight < length)[:, None]
        if BITS == 16:
            low = tl.load(message + codes + 2 * i, mask=inside, other=0).to(tl.int32)
            high = tl.load(message + codes + 2 * i + 1, mask=inside, other=0)
            code = low | (high.to(tl.int8, bitcast=True).to(tl.int32) << 8)
        else:
            octet = BITS * eight[:, None] + column
            used = (column < BITS) & (octet < (length * BITS + 7) // 8)
            word = tl.load(message + codes + octet, mask=used, other=0).to(tl.uint64)
            word = word << (8 * column).to(tl.uint64)
            for width in tl.static_range(3):
                first, second = tl.split(tl.reshape(word, (EIGHTS, 4 >> width, 2)))
                word = first | second
            word = tl.reshape(word, (EIGHTS, 1)) >> (BITS * column).to(tl.uint64)
            code = (word & ((1 << BITS) - 1)).to(tl.int32)
            code = (code ^ (1 << (BITS - 1))) - (1 << (BITS - 1))
        broken = step == float("inf")
        value = code.to(tl.float32) * tl.where(broken, 1.0, step)
        value = tl.where(broken, tl.where(code != 0, float("nan"), 0.0), value)
        if MODE == "subtract":
            total = tl.where(k == 0, total - value, total + value)
        elif MODE == "add":
            total = total + value
        else:
            total = tl.where(k == 0, value, total + value)
    tl.store(out + start + i, total, mask=inside)


@triton.jit(do_not_specialize=["count", "stride"])
def read_floats(
    messages, count, stride, runs, blocks, out, MODE: tl.constexpr, VALUES: tl.constexpr
):
    """The same for the runs that are sent as float32."""
    program = blocks + 2 * tl.program_id(0).to(tl.int64)
    run = runs + COLUMNS * tl.load(program)
    start, length, floats = tl.load(run), tl.load(run + 1), tl.load(run + 3)
    i = tl.load(program + 1) + tl.arange(0, VALUES)
    inside = i < length
    total = tl.full((VALUES,), 0, tl.float32)
    if MODE != "set":
        total = tl.load(out + start + i, mask=inside, other=0.0)
    for k in range(count):
        value = load_floats(messages + k * stride.to(tl.int64) + floats + 4 * i, inside)
        if MODE == "subtract":
            total = tl.where(k == 0, total - value, total + value)
        elif MODE == "add":
            total = total + value
        else:
            total = tl.where(k == 0, value, total + value)
    tl.store(out + start + i, total, mask=inside)
