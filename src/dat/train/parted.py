"""Tensors that several workers wrote a part of each, read by as many workers as there are now.

A file's header says which rows of which tensor are in it. Whoever reads takes the rows it needs
out of the files that have them: a part for a sharded model, all for one that is not.
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

from dat.comm import Part, like, local_of, part_of

PARTS = "parts"
"""The entry of a file's header."""


def described(parts: Mapping[str, Part]) -> dict[str, str]:
    """For a file's header: first row, number of rows, and shape of the whole, by name."""
    return {PARTS: json.dumps({name: list(part) for name, part in parts.items()})}


@dataclass
class Parted:
    """A tensor in several files."""

    name: str
    shape: tuple[int, ...]
    parts: list[tuple[int, int, Path]] = field(default_factory=list)
    """First row, number of rows, and the file."""

    def rows(self, start: int, count: int) -> Tensor:
        """Some of its rows."""
        found = []
        for first, rows, path in sorted(self.parts):
            low, high = max(start, first), min(start + count, first + rows)
            if low < high:
                with safe_open(path, framework="pt") as file:
                    found.append(file.get_slice(self.name)[low - first : high - first])
        if not found:
            with safe_open(self.parts[0][2], framework="pt") as file:
                found.append(file.get_tensor(self.name)[:0])
        return torch.cat(found)

    @property
    def complete(self) -> bool:
        """Whether every row is there once."""
        end = 0
        for first, rows, _ in sorted(self.parts):
            if rows and first != end:
                return False
            end += rows
        return end == self.shape[0]


def find_parts(files: Sequence[Path]) -> dict[str, Parted]:
    """What some workers' files have parts of; a ValueError if rows are missing."""
    found: dict[str, Parted] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            told = json.loads((file.metadata() or {}).get(PARTS, "{}"))
        for name, (start, rows, shape) in told.items():
            it = found.setdefault(name, Parted(name, tuple(shape)))
            it.parts.append((int(start), int(rows), path))
    if gaps := [name for name, it in found.items() if not it.complete]:
        raise ValueError(f"rows of {gaps[0]} are missing")
    return found


def fitted(saved: Tensor | Parted, now: Tensor) -> Tensor:
    """What was saved, cut as the tensor `now` is, or whole if that is whole."""
    part = part_of(now)
    if part is None:
        return saved.rows(0, saved.shape[0]) if isinstance(saved, Parted) else saved
    if isinstance(saved, Parted):
        local = saved.rows(part.start, part.rows)
    else:
        local = saved[part.place].clone()
    return like(local.to(local_of(now).device), now)


def fit_weights(saved: Mapping[str, Tensor | Parted], now: Mapping[str, Tensor]) -> dict[str, Any]:
    """A state dict for a model whose own is `now`."""
    return {name: fitted(it, now[name]) if name in now else it for name, it in saved.items()}


def fit_moments(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A state dict for an optimizer: what has the shape of its parameter is cut as that is."""
    params = [p for group in optimizer.param_groups for p in group["params"]]

    def fits(value: Any, param: Tensor) -> Any:
        shape = tuple(value.shape) if isinstance(value, Tensor | Parted) else None
        return fitted(value, param) if shape == tuple(param.shape) else value

    state = {
        number: {name: fits(value, params[int(number)]) for name, value in moments.items()}
        for number, moments in saved["state"].items()
    }
    return saved | {"state": state}


def split(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Part]]:
    """Which of some tensors are cut up, and what this worker has of them."""
    parts = {name: part_of(value) for name, value in tensors.items()}
    cut = {name: part for name, part in parts.items() if part is not None}
    return {name: local_of(tensors[name]) for name in cut}, cut
