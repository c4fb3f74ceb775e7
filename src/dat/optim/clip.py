"""Gradient clipping by the global norm."""

from __future__ import annotations

from typing import Any

from dat.core.lazy import nn, torch


def clip_gradient(optimizer: torch.optim.Optimizer, max_norm: float) -> None:
    """Make every step of an optimizer scale the gradient first, so that its L2 norm over all
    parameters is at most `max_norm`.

    A step follows the exchange, so all workers scale the same sum alike. The gradients of a sharded
    model are DTensors, whose norm torch takes over all shards.
    """

    def clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, max_norm)

    optimizer.register_step_pre_hook(clip)
    # a fused optimizer unscales a GradScaler's gradients in its step, which would be after `clip`
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
