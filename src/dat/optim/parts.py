"""Layers of which every worker has a part: a layer's length is that of the whole layer.

All parts of a step are measured first, their squares are summed over the workers in one small
exchange, and then all are moved. The exchange is handed in: only `comm` calls collectives, and the
norms that torch takes of such tensors would each be an exchange of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Shards(Protocol):
    """How a worker comes to its part of a tensor that is cut up, and to sums over all parts."""

    def local(self, tensor: Tensor) -> Tensor:
        """The part itself."""

    def like(self, local: Tensor, other: Tensor) -> Tensor:
        """A part as a tensor that is cut as `other` is."""

    def total(self, values: Tensor) -> Tensor:
        """The sum over those that have the other parts."""


class Plan(NamedTuple):
    """An update that waits for the lengths of whole layers; all lists are of parts."""

    group: dict[str, Any]
    params: list[Tensor]
    u: list[Tensor]
    measured: list[Tensor]
    """Whose length the trust ratio depends on, beside that of the weights."""
    states: list[dict[str, Any]]


def state_of(state: dict[str, Any], shards: Shards) -> dict[str, Any]:
    """This worker's part of a parameter's state."""
    return {k: shards.local(v) if isinstance(v, Tensor) else v for k, v in state.items()}


def keep(part: dict[str, Any], state: dict[str, Any], param: Tensor, shards: Shards) -> None:
    """Put what is new in a part into the parameter's state; tensors were changed where they are."""
    for name, value in part.items():
        if not isinstance(value, Tensor):
            state[name] = value
        elif name not in state:
            state[name] = shards.like(value, param)


def whole_norms(parts: Sequence[Tensor], shards: Shards) -> Tensor:
    """The L2 norm of each whole tensor, in one tensor."""
    squares = torch.stack(torch._foreach_norm(list(parts), 2, torch.float64)).square_()
    return shards.total(squares).sqrt_().to(parts[0].dtype)


def measure(plans: Sequence[Plan], shards: Shards) -> list[tuple[Tensor, Tensor]]:
    """Of each plan the lengths of its weights and of what else is measured."""
    if not plans:
        return []
    found = whole_norms([it for plan in plans for it in (*plan.params, *plan.measured)], shards)
    cuts = iter(found.split([len(plan.params) for plan in plans for _ in range(2)]))
    return list(zip(cuts, cuts, strict=True))
