"""Calls the Triton kernels of the optimizers for all layers at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dat.kernels import optimizer_triton as kernels
from dat.kernels.optimizer import BLOCK, CLASSIC, MOMENTUM, Moments

TILE = 256
LANES = 512
"""Sums of a block, eight per tile of values; optimizer_triton.py has the same."""
TILES, BLOCKS, LAYERS, VALUES = 16, 64, 32, 1024
"""What one program works on: tiles, blocks, layers, values."""
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
"""Compilation must not fuse products with sums, which would change their rounding."""


class LayerTables(NamedTuple):
    layers: Tensor
    blocks: Tensor
    largest: int
    """Values of the largest layer."""


def update(
    moments: Moments,
    layers: Sequence[Sequence[Tensor]],
    ratios: Tensor,
    *,
    lr: float,
    weight_decay: float,
    adapt: bool,
    **bounds: float,
) -> None:
    """Update the moments and parameters in place, and write the ratios if `adapt`.

    Layers whose denominators differ, as some had no gradient in earlier steps, take calls of their
    own: coefficients are arguments, and no step copies them to the device.
    """
    same: dict[tuple[float, float], list[int]] = defaultdict(list)
    for index in range(len(layers)):
        same[moments.denominators[index] if moments.denominators else (0.0, 0.0)].append(index)
    for denominator, indices in same.items():
        rows = [(*_row(layers[index]), index) for index in indices]
        tables = _tables(tuple(rows), ratios.device)
        coefficients = _coefficients(moments, denominator, lr, weight_decay, bounds)
        _update(tables, moments.kind, adapt, ratios, coefficients)


def _update(
    tables: LayerTables, kind: int, adapt: bool, ratios: Tensor, coefficients: dict[str, float]
) -> None:
    def arguments(*names: str) -> dict[str, float]:
        return {name: coefficients[name] for name in names}

    layers, blocks, largest = tables
    count, in_block = len(blocks), min(largest, BLOCK)
    tiles = -(-in_block // TILE)
    pass_options = {"KIND": kind, "DECAYED": coefficients["decay"] != 0.0, **OPTIONS}
    sums = torch.empty(2 * count * LANES, device=ratios.device)
    if count and (adapt or kind != CLASSIC):
        kernels.first_pass[(count, -(-tiles // TILES))](
            *(layers, blocks, sums),
            **arguments("decay", "first", "first_rest", "keep", "second", "scale", "floor"),
            TILES=TILES,
            **pass_options,
        )
    if adapt:
        totals = torch.empty(2 * count, dtype=torch.float64, device=ratios.device)
        if count:
            kernels.add_lanes[(-(-2 * count // BLOCKS),)](
                *(sums, totals, 2 * count, 8 * tiles), BLOCKS=BLOCKS, **OPTIONS
            )
        kernels.write_ratios[(-(-len(layers) // LAYERS),)](
            *(layers, totals, ratios, len(layers), -(-largest // BLOCK), count),
            **arguments("decay", "c_l", "c_u", "trust"),
            KIND=kind,
            LAYERS=LAYERS,
            **OPTIONS,
        )
    if count:
        kernels.second_pass[(count, -(-in_block // VALUES))](
            *(layers, blocks, ratios),
            **arguments("lr", "minus_lr", "decay", "keep", "scale", "floor"),
            ADAPT=adapt,
            VALUES=VALUES,
            **pass_options,
        )


def _row(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The pointers and the size of a layer."""
    pointers = [*(tensor.data_ptr() for tensor in tensors), 0]
    return *pointers[:4], tensors[0].numel()


@lru_cache(maxsize=64)
def _tables(rows: tuple[tuple[int, ...], ...], device: torch.device) -> LayerTables:
    """The tables on the device, kept while the tensors stay where they are."""
    table = np.array(rows, dtype=np.int64)
    counts = -(-table[:, 4] // BLOCK)
    first = np.cumsum(counts) - counts
    layer = np.repeat(np.arange(len(table)), counts)
    blocks = np.column_stack([layer, np.arange(len(layer)) - first[layer]])
    table = np.insert(table, 5, first, axis=1)
    return LayerTables(_on(table, device), _on(blocks, device), int(table[:, 4].max()))


def _on(table: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(table)).to(device)


def _coefficients(
    moments: Moments,
    denominator: tuple[float, float],
    lr: float,
    weight_decay: float,
    bounds: dict[str, float],
) -> dict[str, float]:
    """Rounded to single precision, as in optimizer.c."""
    inside = moments.kind == MOMENTUM  # the decay is inside the moment
    exact = {
        "lr": lr,
        "minus_lr": -lr,
        "decay": moments.first * weight_decay if inside else weight_decay,
        "first": moments.first,
        "keep": moments.keep,
        "second": moments.second,
        "scale": denominator[0],
        "floor": denominator[1],
        **{name: bounds.get(name, 0.0) for name in ("c_l", "c_u", "trust")},
    }
    rounded = {name: np.float32(value) for name, value in exact.items()}
    rounded["first_rest"] = np.float32(1) - rounded["first"]
    return {name: float(value) for name, value in rounded.items()}
