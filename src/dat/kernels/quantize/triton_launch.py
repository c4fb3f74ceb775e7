"""Calls the Triton kernels of the quantizer for all runs of a message at once."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dat.kernels.quantize import triton_kernels as kernels
from dat.kernels.quantize.layout import MessageLayout

TILE = 512
"""Values whose norm is computed as one; triton_kernels.py has the same."""
EIGHTS, TILES, GROUPS, VALUES = 128, 32, 64, 1024
"""What one program works on: eight values each, tiles, groups, float32 values."""
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
"""Compilation must not fuse products with sums, which would change their rounding."""


class MessageTables(NamedTuple):
    """The runs of a message and the blocks of each kind, on the device."""

    runs: Tensor
    tiles: int
    tile_blocks: Tensor
    group_blocks: Tensor
    eight_blocks: Tensor
    float_blocks: Tensor


@lru_cache(maxsize=256)
def tables(layout: MessageLayout, device: torch.device) -> MessageTables:
    runs = layout.table
    length, group = runs[:, 1], runs[:, 2]
    quantized = group > 0
    groups = np.where(quantized, -(-length // np.maximum(group, 1)), 0)
    tiles = groups * -(-group // TILE)
    before = np.cumsum(tiles) - tiles
    counts = (
        *((tiles, TILES), (groups, GROUPS)),
        *((np.where(quantized, -(-length // 8), 0), EIGHTS), (length * ~quantized, VALUES)),
    )
    blocks = [_on(_blocks(items, size), device) for items, size in counts]
    return MessageTables(_on(np.column_stack([runs, before]), device), int(tiles.sum()), *blocks)


def measure(x: Tensor, layout: MessageLayout, levels: int, norm: str, message: Tensor) -> None:
    """Write the step sizes and the float32 values of a message."""
    at = tables(layout, x.device)
    parts = torch.empty(at.tiles, dtype=torch.float64, device=x.device)
    options: dict[str, Any] = {"L2": norm == "l2", **OPTIONS}
    _launch(
        kernels.measure_tiles,
        at.tile_blocks,
        x,
        at.runs,
        at.tile_blocks,
        parts,
        TILES=TILES,
        **options,
    )
    _launch(
        *(kernels.write_steps, at.group_blocks, parts, at.runs, at.group_blocks, message, levels),
        GROUPS=GROUPS,
        **options,
    )
    _launch(
        *(kernels.write_floats, at.float_blocks, x, at.runs, at.float_blocks, message),
        VALUES=VALUES,
        **OPTIONS,
    )


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
    """Write the message that encodes `x`; with norm `given`, it holds its step sizes and float32
    values already."""
    if norm != "given":
        measure(x, layout, levels, norm, message)
    at = tables(layout, x.device)
    _launch(
        *(kernels.write_codes, at.eight_blocks, x, at.runs, at.eight_blocks, message, levels),
        *(_signed(key), _signed(key >> 32)),
        BITS=bits,
        RANDOM=random,
        EIGHTS=EIGHTS,
        **OPTIONS,
    )


def decode(messages: Tensor, layout: MessageLayout, *, bits: int, mode: str, out: Tensor) -> None:
    """Set `out` to the first message, one per row, or add or subtract it; then add the others in
    order."""
    at = tables(layout, out.device)
    count, stride = messages.shape[0], messages.stride(0)
    _launch(
        *(kernels.read_codes, at.eight_blocks, messages, count, stride, at.runs, at.eight_blocks),
        out,
        BITS=bits,
        MODE=mode,
        EIGHTS=EIGHTS,
        **OPTIONS,
    )
    _launch(
        *(kernels.read_floats, at.float_blocks, messages, count, stride, at.runs, at.float_blocks),
        out,
        MODE=mode,
        VALUES=VALUES,
        **OPTIONS,
    )


def _launch(kernel: Any, blocks: Tensor, *arguments: Any, **options: Any) -> None:
    """One program per block."""
    if len(blocks):
        kernel[(len(blocks),)](*arguments, **options)


def _blocks(items: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    """(run, first item) of each block of up to `size` items of a run."""
    counts = -(-items // size)
    run = np.repeat(np.arange(len(items)), counts)
    within = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.column_stack([run, within * size])


def _on(table: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(table)).to(device)


def _signed(word: int) -> int:
    """The low 32 bits as a signed number: always the same type for the compiler."""
    return ((word + 2**31) & 0xFFFFFFFF) - 2**31
