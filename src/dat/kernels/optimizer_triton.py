"""The layer-wise update in Triton, for GPUs: the operations of optimizer.c in the same order, for
the same bits.

A first pass updates the moments and sums the squares of theta and of u in the lanes of optimizer.c;
two small kernels add the lanes of a block, and the blocks of a layer, one by one; a second pass
recomputes u and updates theta. `layers` has the pointers of each layer, `blocks` each program's
layer and block. The coefficients are floats that the caller has rounded to single precision. Bits
depend on exact division (`div_rn`), exact roots (`sqrt_rn`) and on products that are not fused with
sums (the launch option `enable_fp_fusion=False`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

COLUMNS = tl.constexpr(7)
"""Columns of `layers`: theta, grad, m, v, size, first block, index of the ratio."""
BLOCK = tl.constexpr(16384)
TILE = tl.constexpr(256)
LANES = tl.constexpr(512)
"""Sums of a block: eight per tile."""
ADAM, MOMENTUM, CLASSIC = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def first_pass(
    layers,
    blocks,
    sums,
    decay,
    first,
    first_rest,
    keep,
    second,
    scale,
    floor,
    KIND: tl.constexpr,
    DECAYED: tl.constexpr,
    TILES: tl.constexpr,
):
    """Update the moments, and write the sums of the squares of theta and of u (of the gradient, for
    classic LARS): those of theta first, then those of u, LANES for each block."""
    program = tl.program_id(0).to(tl.int64)
    layer = layers + COLUMNS * tl.load(blocks + 2 * program)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    column = tl.arange(0, 8)[None, :]
    start = tl.load(blocks + 2 * program + 1) * BLOCK + tile[:, None] * TILE + column
    left = tl.load(layer + 4) - start
    thetas = tl.load(layer).to(tl.pointer_type(tl.float32)) + start
    grads = tl.load(layer + 1).to(tl.pointer_type(tl.float32)) + start
    ms = tl.load(layer + 2).to(tl.pointer_type(tl.float32)) + start
    vs = tl.load(layer + 3).to(tl.pointer_type(tl.float32)) + start
    of_theta = tl.full((TILES, 8), 0, tl.float32)
    of_u = tl.full((TILES, 8), 0, tl.float32)
    for i in range(0, TILE, 8):
        inside = i < left
        theta = tl.load(thetas + i, mask=inside, other=0.0)
        u = tl.load(grads + i, mask=inside, other=0.0)
        if KIND != CLASSIC:
            m = tl.load(ms + i, mask=inside, other=0.0)
            if first < 0.5:  # noqa: SIM108 - Triton has no conditional expression at run time
                m = m + first * (u - m)
            else:
                m = u - (u - m) * first_rest
            if KIND == MOMENTUM:
                if DECAYED:
                    m = m + decay * theta
                u = m
            else:
                v = tl.load(vs + i, mask=inside, other=0.0)
                v = v * keep + (second * u) * u
                tl.store(vs + i, v, mask=inside)
                u = tl.div_rn(m, tl.sqrt_rn(v) * scale + floor)
                if DECAYED:
                    u = u + decay * theta
                u = tl.where(inside, u, 0.0)
            tl.store(ms + i, m, mask=inside)
        of_theta += theta * theta
        of_u += u * u
    lane = sums + LANES * program + tile[:, None] * 8 + column
    tl.store(lane, of_theta)
    tl.store(lane + LANES * tl.num_programs(0).to(tl.int64), of_u)


@triton.jit(do_not_specialize=["count", "lanes"])
def add_lanes(sums, totals, count, lanes, BLOCKS: tl.constexpr):
    """Add up the first lanes of each of `count` blocks, in double precision; the others are 0."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    total = tl.full((BLOCKS,), 0, tl.float64)
    for i in range(lanes):
        lane = tl.load(sums + block.to(tl.int64) * LANES + i, mask=block < count, other=0.0)
        total += lane.to(tl.float64)
    tl.store(totals + block, total, mask=block < count)


@triton.jit(do_not_specialize=["count", "most", "blocks"])
def write_ratios(
    layers,
    totals,
    ratios,
    count,
    most,
    blocks,
    decay,
    c_l,
    c_u,
    trust,
    KIND: tl.constexpr,
    LAYERS: tl.constexpr,
):
    """Add up the blocks of each layer, at most `most`, and write its trust ratio."""
    number = tl.program_id(0) * LAYERS + tl.arange(0, LAYERS)
    exists = number < count
    layer = layers + COLUMNS * number.to(tl.int64)
    size = tl.load(layer + 4, mask=exists, other=0)
    parts = totals + tl.load(layer + 5, mask=exists, other=0)
    of_theta = tl.full((LAYERS,), 0, tl.float64)
    of_u = tl.full((LAYERS,), 0, tl.float64)
    for i in range(most):
        inside = i < (size + BLOCK - 1) // BLOCK
        of_theta += tl.load(parts + i, mask=inside, other=0.0)
        of_u += tl.load(parts + blocks + i, mask=inside, other=0.0)
    # single precision, so that norms vanish and overflow where torch's do
    weight = tl.sqrt_rn(of_theta.to(tl.float32))
    length = tl.sqrt_rn(of_u.to(tl.float32))
    if KIND == CLASSIC:
        length = length + decay * weight
        tau = trust * weight
        adapted = (weight > 0) & (length > 0)
    else:
        tau = tl.where(weight < c_l, c_l, tl.where(weight > c_u, c_u, weight))
        adapted = (tau > 0) & (length > 0)
    ratio = tl.where(adapted, tl.div_rn(tau, tl.where(adapted, length, 1.0)), 1.0)
    tl.store(ratios + tl.load(layer + 6, mask=exists, other=0), ratio, mask=exists)


@triton.jit
def second_pass(
    layers,
    blocks,
    ratios,
    lr,
    minus_lr,
    decay,
    keep,
    scale,
    floor,
    KIND: tl.constexpr,
    DECAYED: tl.constexpr,
    ADAPT: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Update theta, and the momentum of classic LARS."""
    program = tl.program_id(0).to(tl.int64)
    layer = layers + COLUMNS * tl.load(blocks + 2 * program)
    size = tl.load(layer + 4)
    thetas = tl.load(layer).to(tl.pointer_type(tl.float32))
    ms = tl.load(layer + 2).to(tl.pointer_type(tl.float32))
    start = tl.load(blocks + 2 * program + 1) * BLOCK + tl.program_id(1) * VALUES
    i = start + tl.arange(0, VALUES)
    inside = i < size
    theta = tl.load(thetas + i, mask=inside, other=0.0)
    m = tl.load(ms + i, mask=inside, other=0.0)
    if KIND == CLASSIC:
        grads = tl.load(layer + 1).to(tl.pointer_type(tl.float32))
        u = lr * (tl.load(grads + i, mask=inside, other=0.0) + decay * theta)
    elif KIND == ADAM:
        vs = tl.load(layer + 3).to(tl.pointer_type(tl.float32))
        v = tl.load(vs + i, mask=inside, other=0.0)
        u = tl.div_rn(m, tl.sqrt_rn(v) * scale + floor)
        if DECAYED:
            u = u + decay * theta
        u = minus_lr * u
    else:
        u = minus_lr * m
    if ADAPT:
        u = u * tl.load(ratios + tl.load(layer + 6))
    if KIND == CLASSIC:
        m = m * keep + u
        tl.store(ms + i, m, mask=inside)
        theta = theta - m
    else:
        theta = theta + u
    tl.store(thetas + i, theta, mask=inside)
