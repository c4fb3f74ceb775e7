"""The memory of a device: what a worker keeps, and what one step adds at its peak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dat.config import RunConfig
from dat.optim import LAMB, SGD

FLOAT = 4
FEW, MORE = 2, 4
"""Images whose activations are counted."""
COPIES = 4
"""Of a share's images: as drawn, attacked, its gradient, and the next step of the attack."""


class Activations(NamedTuple):
    """Bytes that a forward pass keeps for its backward pass."""

    fixed: float
    per_image: float


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes, by what they are for."""

    weights: int
    gradients: int
    optimizer: int
    copies: int
    """Of the weights: the folded one that is attacked, averaged ones, AWP's."""
    exchange: int
    activations: int
    images: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def count_activations(model: nn.Module, shape: tuple[int, ...]) -> Activations:
    """What autograd saves, of a few images and of twice as many."""
    few, more = (_saved(model, torch.rand(count, *shape)) for count in (FEW, MORE))
    per_image = (more - few) / (MORE - FEW)
    return Activations(max(few - FEW * per_image, 0.0), per_image)


def _saved(model: nn.Module, x: Tensor) -> int:
    """Bytes of the storages that are kept, weights aside, each once."""
    known = {it.untyped_storage().data_ptr() for it in (*model.parameters(), *model.buffers())}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    was = model.training
    model.train()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            kept = model(x)
    finally:
        model.train(was)
    del kept
    return sum(found.values())


def optimizer_states(config: RunConfig) -> int:
    """Numbers kept for every weight: two moments of LAMB, a momentum of the others."""
    if isinstance(config.optimizer, LAMB):
        return 2
    if isinstance(config.optimizer, SGD) and config.optimizer.momentum == 0:
        return 0
    return 1


def memory_of(
    config: RunConfig,
    *,
    values: int,
    activations: Activations,
    pixels: int,
    images: float,
    exchange: int,
) -> Memory:
    """Of a worker with a share of so many images and so many bytes kept by the exchange."""
    whole = FLOAT * values
    at_once = images / config.compute.pieces
    half = 0.5 if config.compute.precision == "bfloat16" else 1.0
    feedback = 2 * whole if config.quantizer.error_feedback and not config.quantizer.dense else 0
    copies = sum(map(bool, (config.compute.fold, config.train.ema, config.train.awp)))
    return Memory(
        weights=whole,
        gradients=whole,
        optimizer=optimizer_states(config) * whole,
        copies=copies * whole,
        exchange=exchange + feedback,
        activations=round(half * (activations.fixed + at_once * activations.per_image)),
        images=round(COPIES * images * FLOAT * pixels),
    )
