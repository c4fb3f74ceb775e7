"""Sharded tensors in checkpoints, read by any number of workers.

Several workers write one shard of a tensor each; a file's header says which rows of which tensor it
holds. A reader takes the rows it needs from the files that have them: the rows of its own shard, or
all rows if its model is not sharded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dat.distributed import TensorShard, like, local_tensor, shard_of

PARTS = "parts"
"""The entry of a file's header."""


def shard_metadata(shards: Mapping[str, TensorShard]) -> dict[str, str]:
    """A file's header: by tensor name, the first row, the number of rows, and the full shape."""
    return {PARTS: json.dumps({name: list(shard) for name, shard in shards.items()})}


@dataclass
class SavedShards:
    """A tensor whose rows are spread over several files."""

    name: str
    shape: tuple[int, ...]
    parts: list[tuple[int, int, Path]] = field(default_factory=list)
    """First row, number of rows, and file of each shard."""

    def rows(self, start: int, count: int) -> Tensor:
        """Read `count` rows from `start` on."""
        slices = []
        for first, rows, path in sorted(self.parts):
            low, high = max(start, first), min(start + count, first + rows)
            if low < high:
                with safe_open(path, framework="pt") as file:
                    slices.append(file.get_slice(self.name)[low - first : high - first])
        if not slices:
            with safe_open(self.parts[0][2], framework="pt") as file:
                slices.append(file.get_tensor(self.name)[:0])
        return torch.cat(slices)

    @property
    def complete(self) -> bool:
        """Whether every row is saved exactly once."""
        end = 0
        for first, rows, _ in sorted(self.parts):
            if rows and first != end:
                return False
            end += rows
        return end == self.shape[0]


def find_shards(files: Sequence[Path]) -> dict[str, SavedShards]:
    """The sharded tensors in the workers' files, by name; a ValueError if rows are missing."""
    tensors: dict[str, SavedShards] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            shards = json.loads((file.metadata() or {}).get(PARTS, "{}"))
        for name, (start, rows, shape) in shards.items():
            tensor = tensors.setdefault(name, SavedShards(name, tuple(shape)))
            tensor.parts.append((int(start), int(rows), path))
    if incomplete := [name for name, tensor in tensors.items() if not tensor.complete]:
        raise ValueError(f"rows of {incomplete[0]} are missing")
    return tensors


def reshard(saved: Tensor | SavedShards, current: Tensor) -> Tensor:
    """A saved tensor, sharded like the tensor `current`, or unsharded if that is."""
    shard = shard_of(current)
    if shard is None:
        return saved.rows(0, saved.shape[0]) if isinstance(saved, SavedShards) else saved
    if isinstance(saved, SavedShards):
        local = saved.rows(shard.start, shard.rows)
    else:
        local = saved[shard.as_slice].clone()
    return like(local.to(local_tensor(current).device), current)


def reshard_weights(
    saved: Mapping[str, Tensor | SavedShards], current: Mapping[str, Tensor]
) -> dict[str, Any]:
    """A saved state dict, for a model whose state dict is `current`."""
    return {
        name: reshard(value, current[name]) if name in current else value
        for name, value in saved.items()
    }


def reshard_optimizer(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A saved optimizer state dict: values of a parameter's shape are sharded like that."""
    params = [p for group in optimizer.param_groups for p in group["params"]]

    def fit(value: Any, param: Tensor) -> Any:
        shape = tuple(value.shape) if isinstance(value, Tensor | SavedShards) else None
        return reshard(value, param) if shape == tuple(param.shape) else value

    state = {
        number: {name: fit(value, params[int(number)]) for name, value in moments.items()}
        for number, moments in saved["state"].items()
    }
    return saved | {"state": state}


def local_shards(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, TensorShard]]:
    """This worker's shards of those tensors that are sharded, and which rows they are."""
    parts = {name: shard_of(value) for name, value in tensors.items()}
    shards = {name: part for name, part in parts.items() if part is not None}
    return {name: local_tensor(tensors[name]) for name in shards}, shards
