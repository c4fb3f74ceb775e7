"""Who evaluates, if the caller names no workers."""

from __future__ import annotations

from torch import nn

from dat.distributed import World


def world_of(model: nn.Module) -> World:
    """The current workers, on the model's device."""
    parameter = next(model.parameters(), None)
    return World.current("auto" if parameter is None else str(parameter.device))
