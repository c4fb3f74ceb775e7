"""LALR, the layer-wise adaptive learning rate of eq. (3):

    theta_i <- theta_i - lr * tau(||theta_i||) / ||u_i|| * u_i,   tau(z) = min(max(z, c_l), c_u)

A layer is a parameter tensor, as in the paper's code; tau(||theta_i||) / ||u_i|| is its trust
ratio. Over Adam's direction this is LAMB, over momentum it is LARS (You et al. 2019, "Large batch
optimization for deep learning: training BERT in 76 minutes", arXiv 1904.00962).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from dat.optim import kernel, parts
from dat.optim.directions import Direction, NativeDirection, State

Group = dict[str, Any]

CHUNK = 2**20
"""Elements that one foreach call takes. It keeps the temporaries small: LAMB's step over a
ResNet-50, on one thread, takes about half the time of a single call over all layers."""


class Layerwise(torch.optim.Optimizer, ABC):
    """An optimizer that gives each layer its own rate.

    A group's `adapt = False` holds its ratio at 1. Nothing in a step waits for the device. A layer
    that the native kernel takes is updated there, any other by torch.
    """

    shards: parts.Shards | None = None
    """To be set where parameters are cut up over workers; the layers are then updated in parts."""
    _ratios: Sequence[tuple[Tensor, Tensor]] = ()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.shards is not None:
            self._ratios = self._step_in_parts(self.shards)
            return loss
        ratios: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            for params, native in self._batches(group["params"]):
                grads = [p.grad for p in params if p.grad is not None]
                update = self._update_natively if native else self._update
                found = update(group, params, grads)
                if found is not None:
                    ratios += zip(params, found.unbind(), strict=True)
        self._ratios = ratios
        return loss

    def trust_ratios(self) -> list[tuple[Tensor, Tensor]]:
        """(parameter, ratio) of each adapted layer in the last step; ratios stay on the device."""
        return list(self._ratios)

    def _step_in_parts(self, shards: parts.Shards) -> list[tuple[Tensor, Tensor]]:
        """All layers at once, so that their squares are summed over the workers in one go."""
        plans, layers = [], []
        for group in self.param_groups:
            whole = [p for p in group["params"] if p.grad is not None]
            if not whole:
                continue
            params = [shards.local(p) for p in whole]
            grads = [shards.local(p.grad) for p in whole]
            states = [parts.state_of(self.state[p], shards) for p in whole]
            u, measured = self._direct(group, params, grads, states)
            for part, param in zip(states, whole, strict=True):
                parts.keep(part, self.state[param], param, shards)
            plans.append(parts.Plan(group, params, u, measured, states))
            layers.append(whole)
        lengths = iter(parts.measure([it for it in plans if it.group["adapt"]], shards))
        found: list[tuple[Tensor, Tensor]] = []
        for plan, whole in zip(plans, layers, strict=True):
            ratios = self._ratio(plan.group, *next(lengths)) if plan.group["adapt"] else None
            self._move(plan.group, plan.params, plan.u, plan.states, ratios)
            if ratios is not None:
                found += zip(whole, ratios.unbind(), strict=True)
        return found

    def _update(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> Tensor | None:
        """Move the parameters; the trust ratios in one tensor, or none without adaptation."""
        states = [self.state[param] for param in params]
        u, measured = self._direct(group, params, grads, states)
        ratios = self._ratio(group, norms(params), norms(measured)) if group["adapt"] else None
        self._move(group, params, u, states, ratios)
        return ratios

    @abstractmethod
    def _direct(
        self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Where to move, and whose length counts beside that of the parameters."""

    @abstractmethod
    def _ratio(self, group: Group, weight: Tensor, length: Tensor) -> Tensor:
        """The trust ratios, from the lengths of parameters and of what `_direct` named."""

    @abstractmethod
    def _move(
        self,
        group: Group,
        params: list[Tensor],
        u: list[Tensor],
        states: list[State],
        ratios: Tensor | None,
    ) -> None:
        """Move the parameters."""

    @abstractmethod
    def _update_natively(
        self, group: Group, params: list[Tensor], grads: list[Tensor]
    ) -> Tensor | None:
        """The same in the kernel."""

    @property
    def _is_native(self) -> bool:
        """Whether the kernel knows this optimizer."""
        return True

    def _batches(self, params: Iterable[Tensor]) -> list[tuple[list[Tensor], bool]]:
        """Those that have a gradient, alike in device and type, and whether they are the kernel's.

        The kernel takes all at once, torch about CHUNK elements at a time.
        """
        full: list[tuple[list[Tensor], bool]] = []
        filling: dict[tuple[bool, object, object], list[Tensor]] = defaultdict(list)
        knows = self._is_native
        for param in params:
            if param.grad is None:
                continue
            if hasattr(param, "placements"):
                raise ValueError(
                    f"{type(self).__name__}: the parameters are sharded, and a part's length is "
                    "not its layer's; set the optimizer's `shards` (dat.comm.ShardedExchange has "
                    "them)"
                )
            if param.grad.layout != torch.strided:
                raise ValueError(
                    f"{type(self).__name__} needs dense gradients, got {param.grad.layout}: "
                    "an embedding with sparse=True?"
                )
            kind = (knows and kernel.takes(param), param.device, param.dtype)
            filling[kind].append(param)
            if not kind[0] and sum(p.numel() for p in filling[kind]) >= CHUNK:
                full.append((filling.pop(kind), False))
        return full + [(params, native) for (native, *_), params in filling.items()]


class LALR(Layerwise):
    """Eq. (3) over a base direction. Options of a group: lr, weight_decay, adapt, c_l, c_u."""

    def __init__(
        self,
        params: Iterable[Any],
        direction: Direction,
        *,
        lr: float,
        weight_decay: float = 0.0,
        c_l: float = 0.0,
        c_u: float = 10.0,
        adapt: bool = True,
    ) -> None:
        if lr < 0 or weight_decay < 0:
            raise ValueError(f"lr = {lr}, weight_decay = {weight_decay}: must be at least 0")
        if not 0 <= c_l <= c_u or c_u == 0:
            raise ValueError(f"c_l = {c_l}, c_u = {c_u}: must be 0 <= c_l <= c_u, and c_u above 0")
        defaults = {"lr": lr, "weight_decay": weight_decay, "c_l": c_l, "c_u": c_u, "adapt": adapt}
        super().__init__(params, defaults)
        self.direction = direction

    def __getstate__(self) -> dict[str, Any]:
        # torch pickles and copies only what it knows of
        return super().__getstate__() | {"direction": self.direction}

    def _direct(
        self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]
    ) -> tuple[list[Tensor], list[Tensor]]:
        u = self.direction(params, grads, states, group["weight_decay"])
        return u, u

    def _ratio(self, group: Group, weight: Tensor, length: Tensor) -> Tensor:
        # Taken literally, tau(0) = 0 freezes for ever what starts at zero (BN shifts, biases), and
        # u = 0 is 0/0. Ratio 1 in both cases, as in the paper's code; with c_l > 0 a layer at zero
        # has tau = c_l and needs no exception.
        tau = weight.clamp(group["c_l"], group["c_u"])
        return torch.where((tau > 0) & (length > 0), tau / length, 1.0)

    def _move(
        self,
        group: Group,
        params: list[Tensor],
        u: list[Tensor],
        states: list[State],
        ratios: Tensor | None,
    ) -> None:
        if ratios is None:
            torch._foreach_add_(params, u, alpha=-group["lr"])
        else:
            torch._foreach_addcmul_(params, u, ratios.unbind(), value=-group["lr"])

    @property
    def _is_native(self) -> bool:
        return isinstance(self.direction, NativeDirection)

    def _update_natively(
        self, group: Group, params: list[Tensor], grads: list[Tensor]
    ) -> Tensor | None:
        assert isinstance(self.direction, NativeDirection)
        states = [self.state[param] for param in params]
        moments = self.direction.moments(params, states)
        options = {name: group[name] for name in ("lr", "weight_decay", "adapt", "c_l", "c_u")}
        return kernel.update(moments, params, grads, states, **options)


def norms(tensors: list[Tensor]) -> Tensor:
    """The L2 norm of each tensor, in one tensor."""
    return torch.stack(torch._foreach_norm(tensors))
