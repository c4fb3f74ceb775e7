"""An estimate of a worker's memory: its state, and the peak of a step."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dat.config.schema import RunConfig
from dat.optim import SGD, AdamW, LAMBSettings

FLOAT = 4
BATCHES = 2, 4
"""Batch sizes whose activations are counted."""
IMAGE_COPIES = 4
"""Clean images, adversarial images, their gradient, and the next iterate of the attack."""


class Activations(NamedTuple):
    """Bytes that a forward pass saves for its backward pass."""

    fixed: float
    per_image: float


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes, by purpose."""

    weights: int
    gradients: int
    optimizer: int
    copies: int
    """Copies of the weights: the folded one to attack, the average, those of AWP."""
    exchange: int
    activations: int
    images: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def count_activations(model: nn.Module, shape: tuple[int, ...]) -> Activations:
    """What autograd saves: a fixed part and one per image, from two batch sizes. A model on the
    meta device gives the same numbers and computes nothing."""
    small, large = BATCHES
    device = next(model.parameters()).device
    saved, saved_more = (
        _saved_bytes(model, torch.rand(count, *shape, device=device)) for count in BATCHES
    )
    per_image = (saved_more - saved) / (large - small)
    return Activations(max(saved - small * per_image, 0.0), per_image)


def _saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes of the distinct storages that autograd saves, without weights and buffers."""
    tensors = (*model.parameters(), *model.buffers())
    own = {tensor.untyped_storage()._cdata for tensor in tensors}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:  # on the meta device there are no data pointers
            saved[storage._cdata] = storage.nbytes()
        return tensor

    was_training = model.training
    model.train()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(x)
    finally:
        model.train(was_training)
    del output
    return sum(saved.values())


def host_memory() -> int | None:
    """Available bytes of this machine's memory, if known."""
    with suppress(OSError, AttributeError, ValueError):
        meminfo = Path("/proc/meminfo")
        if meminfo.is_file():
            entries = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
            return 1024 * int(entries["MemAvailable"].split()[0])
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def optimizer_states(config: RunConfig) -> int:
    """Values kept per weight: two moments of LAMB and AdamW, one momentum of the others (Muon's few
    parameters that are not matrices have two)."""
    if isinstance(config.optimizer, LAMBSettings | AdamW):
        return 2
    if isinstance(config.optimizer, SGD) and config.optimizer.momentum == 0:
        return 0
    return 1


def estimate_memory(
    config: RunConfig,
    *,
    values: int,
    activations: Activations,
    pixels: int,
    images: float,
    exchange: int,
) -> MemoryEstimate:
    """The memory of a worker with `images` images per step and `exchange` bytes of buffers."""
    weights = FLOAT * values
    at_once = images / config.compute.pieces
    half = 1.0 if config.compute.precision == "float32" else 0.5
    feedback = 2 * weights if config.quantizer.error_feedback and not config.quantizer.dense else 0
    options = config.train.options
    copies = sum(map(bool, (config.compute.fold, options.averaging.decay, options.awp.gamma)))
    return MemoryEstimate(
        weights=weights,
        gradients=weights,
        optimizer=optimizer_states(config) * weights,
        copies=copies * weights,
        exchange=exchange + feedback,
        activations=round(half * (activations.fixed + at_once * activations.per_image)),
        images=round(IMAGE_COPIES * images * FLOAT * pixels),
    )
