"""Activation checkpointing: recompute a block's activations in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from dat.core.lazy import nn
from dat.core.settings import SettingError
from dat.kernels import convolve


def blocks_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """Children of an nn.Sequential or nn.ModuleList that have children themselves and are neither;
    of nested blocks, only the innermost."""
    sequences = (nn.Sequential, nn.ModuleList)
    blocks = {
        id(child): child
        for module in model.modules()
        if isinstance(module, sequences)
        for child in module.children()
        if not isinstance(child, sequences) and any(child.children())
    }
    return tuple(
        block
        for block in blocks.values()
        if not any(id(module) in blocks for module in list(block.modules())[1:])
    )


def required_blocks(model: nn.Module) -> tuple[nn.Module, ...]:
    blocks = blocks_of(model)
    if not blocks:
        raise SettingError(
            "compute.recompute: the model has no blocks (modules with submodules, inside an "
            "nn.Sequential or nn.ModuleList)"
        )
    return blocks


@contextmanager
def recomputed(block: nn.Module, convolutions: tuple[nn.Module, ...]) -> Iterator[None]:
    from torch.utils.checkpoint import checkpoint

    plain: Callable[..., Any] = block.forward
    norms = [
        module for module in block.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    tracking = [norm for norm in norms if norm.track_running_stats]

    @contextmanager
    def recomputation(forwards: list[Any]) -> Iterator[None]:
        """Repeat the first pass with the same `forward` of each batch norm, but without updating
        running statistics a second time."""
        current = [vars(norm).get("forward") for norm in norms]
        _set_forward(norms, forwards)
        before = [(norm, norm.momentum) for norm in tracking]
        for norm in tracking:
            norm.momentum = 0.0
        try:
            with convolve.native_convolutions(convolutions):
                yield
        finally:
            _set_forward(norms, current)
            for norm, momentum in before:
                norm.momentum = momentum
                if norm.training and norm.num_batches_tracked is not None:
                    norm.num_batches_tracked.sub_(1)

    def forward(*arguments: Any, **options: Any) -> Any:
        forwards = [vars(norm).get("forward") for norm in norms]
        contexts = lambda: (nullcontext(), recomputation(forwards))  # noqa: E731
        return checkpoint(plain, *arguments, use_reentrant=False, context_fn=contexts, **options)

    block.forward = forward
    try:
        yield
    finally:
        del block.forward


def _set_forward(norms: Sequence[nn.Module], forwards: Sequence[Any]) -> None:
    """Set each module's `forward`; None restores the class's own."""
    for norm, forward in zip(norms, forwards, strict=True):
        if forward is not None:
            norm.forward = forward
        else:
            vars(norm).pop("forward", None)
