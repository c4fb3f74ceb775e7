"""LALR, the layer-wise adaptive learning rate of eq. (3):

    theta_i <- theta_i - lr * tau(||theta_i||) / ||u_i|| * u_i,   tau(z) = min(max(z, c_l), c_u)

A layer is a parameter tensor, as in the paper's code; tau(||theta_i||) / ||u_i|| is its trust
ratio. Over Adam's direction this is LAMB, over momentum it is LARS (You et al. 2019, "Large batch
optimization for deep learning: training BERT in 76 minutes", arXiv 1904.00962).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from dat.core import devices
from dat.kernels import optimizer as kernel
from dat.optim import sharded
from dat.optim.configured import fill_missing
from dat.optim.directions import AdamDirection, Direction, NativeDirection, State

Group = dict[str, Any]

CHUNKS = {"cpu": 2**20, "accelerator": 2**24}
"""Elements per foreach call. On CPUs small temporaries are faster: with one thread, LAMB's step for
a ResNet-50 takes about half the time of a single call for all layers. A GPU wants few launches; its
number bounds the memory for temporaries, and was not tuned on one."""


class Layerwise(torch.optim.Optimizer, ABC):
    """Base class of optimizers with layer-wise learning rates.

    `adapt = False` fixes the trust ratios of a group at 1; `adapt_1d = False` those of its
    parameters with at most one dimension (biases, BN), which `decay_1d = False` does not decay.
    A step never waits for the device. The native kernel updates the layers that it supports, torch
    all others.
    """

    shards: sharded.ShardsLike | None = None
    """Must be set if the parameters are sharded over workers."""
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
            self._ratios = self._step_sharded(self.shards)
            return loss
        trust_ratios: list[tuple[Tensor, Tensor]] = []
        for group in self._groups():
            for params, native in self._chunks(group["params"]):
                grads = [p.grad for p in params if p.grad is not None]
                update = self._update_natively if native else self._update
                ratios = update(group, params, grads)
                if ratios is not None:
                    trust_ratios += zip(params, ratios.unbind(), strict=True)
        self._ratios = trust_ratios
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        fill_missing(state, getattr(self, "param_groups", state["param_groups"]))
        super().__setstate__(state)

    def trust_ratios(self) -> list[tuple[Tensor, Tensor]]:
        """(parameter, ratio) of each adapted layer in the last step; ratios stay on the device."""
        return list(self._ratios)

    def _groups(self) -> Iterator[Group]:
        """The parameter groups, in two parts where 1-d parameters are treated differently."""
        for group in self.param_groups:
            adapt_1d, decay_1d = group.get("adapt_1d", True), group.get("decay_1d", True)
            if adapt_1d and decay_1d:
                yield group
                continue
            params = group["params"]
            yield group | {"params": [p for p in params if p.dim() > 1]}
            yield group | {
                "params": [p for p in params if p.dim() <= 1],
                "adapt": group["adapt"] and adapt_1d,
                "weight_decay": group["weight_decay"] if decay_1d else 0.0,
            }

    def _step_sharded(self, shards: sharded.ShardsLike) -> list[tuple[Tensor, Tensor]]:
        """A step for all layers at once, so that one collective sums all squares."""
        if not self._is_shardable:
            raise ValueError(
                f"{type(self).__name__}: the parameters are sharded, and its direction needs whole "
                "layers; use another direction, or do not shard the model"
            )
        updates, layers = [], []
        for group in self._groups():
            full = [p for p in group["params"] if p.grad is not None]
            if not full:
                continue
            params = [shards.local(p) for p in full]
            grads = [shards.local(p.grad) for p in full]
            states = [sharded.local_state(self.state[p], shards) for p in full]
            u, measured = self._direction(group, params, grads, states)
            for local, param in zip(states, full, strict=True):
                sharded.store_state(local, self.state[param], param, shards)
            updates.append(sharded.PendingUpdate(group, params, u, measured, states))
            layers.append(full)
        adapted = [update for update in updates if update.group["adapt"]]
        layer_norms = iter(sharded.update_norms(adapted, shards))
        trust_ratios: list[tuple[Tensor, Tensor]] = []
        for update, full in zip(updates, layers, strict=True):
            group = update.group
            ratios = self._trust_ratio(group, *next(layer_norms)) if group["adapt"] else None
            self._apply_update(group, update.params, update.u, update.states, ratios)
            if ratios is not None:
                trust_ratios += zip(full, ratios.unbind(), strict=True)
        return trust_ratios

    def _update(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> Tensor | None:
        """Update the parameters; return the trust ratios in one tensor, or None without `adapt`."""
        states = [self.state[param] for param in params]
        u, measured = self._direction(group, params, grads, states)
        adapt = group["adapt"]
        ratios = self._trust_ratio(group, norms(params), norms(measured)) if adapt else None
        self._apply_update(group, params, u, states, ratios)
        return ratios

    @abstractmethod
    def _direction(
        self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The directions u, and the tensors whose norms the trust ratios depend on."""

    @abstractmethod
    def _trust_ratio(self, group: Group, weight_norm: Tensor, norm: Tensor) -> Tensor:
        """The trust ratios, from the norms of the parameters and of the second result of
        `_direction`."""

    @abstractmethod
    def _apply_update(
        self,
        group: Group,
        params: list[Tensor],
        u: list[Tensor],
        states: list[State],
        ratios: Tensor | None,
    ) -> None:
        """Update the parameters in place."""

    @abstractmethod
    def _update_natively(
        self, group: Group, params: list[Tensor], grads: list[Tensor]
    ) -> Tensor | None:
        """The same as `_update`, in the native kernel."""

    @property
    def _is_native(self) -> bool:
        """Whether the native kernel implements this optimizer."""
        return True

    @property
    def _is_shardable(self) -> bool:
        """Whether the direction of a shard is the shard of the layer's direction."""
        return True

    def _chunks(self, params: Iterable[Tensor]) -> list[tuple[list[Tensor], bool]]:
        """The parameters with a gradient, in chunks of one device and dtype, and whether the native
        kernel updates them.

        The kernel takes all its parameters in one chunk, torch about CHUNKS elements at a time.
        """
        full: list[tuple[list[Tensor], bool]] = []
        filling: dict[tuple[bool, object, object], list[Tensor]] = defaultdict(list)
        is_native = self._is_native and not torch.compiler.is_compiling()
        for param in params:
            if param.grad is None:
                continue
            if hasattr(param, "placements"):
                raise ValueError(
                    f"{type(self).__name__}: the parameters are sharded, and the norm of a shard "
                    "is not that of its layer; set the optimizer's `shards` "
                    "(dat.distributed.ShardedExchange has them)"
                )
            if param.grad.layout != torch.strided:
                raise ValueError(
                    f"{type(self).__name__} needs dense gradients, got {param.grad.layout}: "
                    "an embedding with sparse=True?"
                )
            kind = (is_native and kernel.supports(param), param.device, param.dtype)
            filling[kind].append(param)
            most = devices.by_device(param.device, **CHUNKS)
            if not kind[0] and sum(p.numel() for p in filling[kind]) >= most:
                full.append((filling.pop(kind), False))
        return full + [(params, native) for (native, *_), params in filling.items()]


class LALR(Layerwise):
    """Eq. (3) over a base direction.

    Parameter groups may override all options, and the numbers among the direction's fields: `betas`
    of Adam's direction, `momentum` of the others.
    """

    def __init__(
        self,
        params: ParamsT,
        direction: Direction | None = None,
        *,
        lr: float | Tensor = 0.01,
        weight_decay: float = 0.0,
        c_l: float = 0.0,
        c_u: float = 10.0,
        adapt: bool = True,
        decay_1d: bool = True,
        adapt_1d: bool = True,
    ) -> None:
        """`direction` is Adam's by default, as in LAMB."""
        check_rates(lr, weight_decay)
        if not 0 <= c_l <= c_u or c_u == 0:
            raise ValueError(f"c_l = {c_l}, c_u = {c_u}: must be 0 <= c_l <= c_u, and c_u above 0")
        self.direction = AdamDirection() if direction is None else direction
        own = {"lr": lr, "weight_decay": weight_decay, "c_l": c_l, "c_u": c_u, "adapt": adapt}
        switches = {"decay_1d": decay_1d, "adapt_1d": adapt_1d}
        super().__init__(params, direction_options(self.direction) | own | switches)

    def __getstate__(self) -> dict[str, Any]:
        # torch's __getstate__ covers its own attributes only
        return super().__getstate__() | {"direction": self.direction}

    def _direction(
        self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]
    ) -> tuple[list[Tensor], list[Tensor]]:
        u = self._direction_of(group)(params, grads, states, group["weight_decay"])
        return u, u

    def _direction_of(self, group: Group) -> Direction:
        """The direction, with the options of the group."""
        names = direction_options(self.direction)
        if not names:
            return self.direction
        options = {name: group[name] for name in names}
        return dataclasses.replace(self.direction, **options)  # type: ignore[type-var]

    def _trust_ratio(self, group: Group, weight_norm: Tensor, norm: Tensor) -> Tensor:
        # Taken literally, tau(0) = 0 would freeze layers that start at zero (BN shifts, biases),
        # and u = 0 would be 0/0. The ratio is 1 in both cases, as in the paper's code; with c_l > 0
        # a layer at zero has tau = c_l and needs no exception.
        tau = weight_norm.clamp(group["c_l"], group["c_u"])
        return torch.where((tau > 0) & (norm > 0), tau / norm, 1.0)

    def _apply_update(
        self,
        group: Group,
        params: list[Tensor],
        u: list[Tensor],
        states: list[State],
        ratios: Tensor | None,
    ) -> None:
        lr = group["lr"]
        if isinstance(lr, Tensor):
            torch._foreach_addcmul_(params, u, scaled_rates(lr, params, ratios), value=-1)
        elif ratios is None:
            torch._foreach_add_(params, u, alpha=-lr)
        else:
            torch._foreach_addcmul_(params, u, ratios.unbind(), value=-lr)

    @property
    def _is_native(self) -> bool:
        return isinstance(self.direction, NativeDirection)

    @property
    def _is_shardable(self) -> bool:
        return getattr(self.direction, "shardable", True)

    def _update_natively(
        self, group: Group, params: list[Tensor], grads: list[Tensor]
    ) -> Tensor | None:
        direction = self._direction_of(group)
        assert isinstance(direction, NativeDirection)
        states = [self.state[param] for param in params]
        moments = direction.moments(params, states)
        options = {name: group[name] for name in ("weight_decay", "adapt", "c_l", "c_u")}
        return kernel.update(moments, params, grads, states, lr=float(group["lr"]), **options)


def check_rates(lr: float | Tensor, weight_decay: float) -> None:
    """Raise if the learning rate or the weight decay is negative."""
    if lr < 0 or weight_decay < 0:
        raise ValueError(f"lr = {lr}, weight_decay = {weight_decay}: must be at least 0")


def direction_options(direction: object) -> dict[str, Any]:
    """The fields of a direction that become options of the parameter groups: those with plain
    values, if it is a dataclass."""
    if not dataclasses.is_dataclass(direction):
        return {}
    values = {f.name: getattr(direction, f.name) for f in dataclasses.fields(direction) if f.init}
    return {name: v for name, v in values.items() if isinstance(v, int | float | str | tuple)}


def scaled_rates(lr: Tensor, params: Sequence[Tensor], ratios: Tensor | None) -> tuple[Tensor, ...]:
    """The learning rate of each parameter, on its device: to read a tensor would wait for it."""
    rates = lr.to(params[0]).reshape(()).expand(len(params))
    return (rates if ratios is None else rates * ratios).unbind()


def norms(tensors: list[Tensor]) -> Tensor:
    """The L2 norm of each tensor, in one tensor."""
    return torch.stack(torch._foreach_norm(tensors))
