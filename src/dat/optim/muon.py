"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): the momentum of each matrix,
orthogonalized, is its update; AdamW updates all other parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from dat.optim.configured import Configured, fill_missing
from dat.optim.orthogonal import (
    as_matrix,
    flops,
    is_matrix,
    nesterov,
    orthogonalize,
    rate_factor,
)
from dat.optim.settings.muon import MuonSettings

Group = dict[str, Any]

WORTH_SHARING = 1e9
"""Operations for all matrices above which sharing them saves time. Two workers with one CPU core
each take 3.1 instead of 6.7 s for a ResNet-50 (2.5e11), as long for 1.5e9 operations, and half a
millisecond longer for 2.4e7."""


class PeersLike(Protocol):
    """The workers, all of which take the same step."""

    rank: int
    size: int

    def all_gather(self, values: Tensor) -> Tensor:
        """The values of all workers, one row per rank."""


class MuonOptions(TypedDict, total=False):
    """The types of the options; `MuonSettings` defines them."""

    weight_decay: float
    momentum: float
    nesterov: bool
    ns_steps: int
    adjust_lr_fn: str
    precision: str
    adamw_lr_ratio: float
    betas: tuple[float, float]
    eps: float
    decay_1d: bool


class MatrixUpdate(NamedTuple):
    """A matrix and its momentum, which is to be orthogonalized."""

    param: Tensor
    momentum: Tensor
    group: Group

    def orthogonalized(self) -> Tensor:
        dtype = torch.bfloat16 if self.group["precision"] == "bfloat16" else None
        return orthogonalize(as_matrix(self.momentum), steps=self.group["ns_steps"], dtype=dtype)


class Muon(Configured):
    """Matrices move along their orthogonalized momentum; convolutions are matrices of outputs x the
    rest. AdamW updates parameters that are not (`is_matrix`), and groups with `orthogonalize`
    false: pass embeddings, and usually the last layer, in such a group.

    Without parameters, a `MuonSettings` with the same options, for a `Trainer`, which finds these
    layers in the model. Parameter groups may override all options.
    """

    settings = MuonSettings
    settings_only = "clip", "head"
    peers: PeersLike | None = None
    """If set, each worker orthogonalizes its share of the matrices and sends them to the others."""

    @overload
    def __new__(
        cls, params: ParamsT, lr: float | Tensor = ..., **options: Unpack[MuonOptions]
    ) -> Self: ...

    @overload
    def __new__(  # type: ignore[misc]  # not an instance
        cls,
        *,
        lr: float = ...,
        clip: float | None = ...,
        head: str = ...,
        **options: Unpack[MuonOptions],
    ) -> MuonSettings: ...

    def __new__(cls, *args: Any, **options: Any) -> Any:
        return super().__new__(cls, *args, **options)

    def _configure(self, params: ParamsT, lr: float | Tensor, settings: MuonSettings) -> None:
        defaults = {name: getattr(settings, name) for name in self._option_names()}
        torch.optim.Optimizer.__init__(self, params, defaults | {"lr": lr, "orthogonalize": True})

    def __setstate__(self, state: dict[str, Any]) -> None:
        fill_missing(state, getattr(self, "param_groups", state["param_groups"]))
        super().__setstate__(state)

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
        updates: list[MatrixUpdate] = []
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            _check(params)
            chosen = [group["orthogonalize"] and is_matrix(p) for p in params]
            matrices = [p for p, matrix in zip(params, chosen, strict=True) if matrix]
            updates += self._momentum(group, matrices)
            self._adamw(group, [p for p, matrix in zip(params, chosen, strict=True) if not matrix])
        for update, direction in zip(updates, self._orthogonalize(updates), strict=True):
            param, group = update.param, update.group
            rate = float(group["lr"])
            param.mul_(1 - rate * group["weight_decay"])
            factor = rate_factor(param, group["adjust_lr_fn"])
            param.add_(direction.reshape(param.shape), alpha=-rate * factor)
        return loss

    def _momentum(self, group: Group, params: list[Tensor]) -> list[MatrixUpdate]:
        if not params:
            return []
        grads = [p.grad for p in params if p.grad is not None]
        states = [self.state[p] for p in params]
        options = {"momentum": group["momentum"], "enabled": group["nesterov"]}
        momenta = nesterov(params, grads, states, **options)
        return [MatrixUpdate(p, m, group) for p, m in zip(params, momenta, strict=True)]

    def _orthogonalize(self, updates: Sequence[MatrixUpdate]) -> list[Tensor]:
        """The orthogonalized momenta; the workers share the work if the results fit one tensor."""
        peers = self.peers
        kinds = {(update.param.device, update.param.dtype) for update in updates}
        precisions = {update.group["precision"] for update in updates}
        costs = [flops(update.param, update.group["ns_steps"]) for update in updates]
        few = peers is None or peers.size == 1 or sum(costs) < WORTH_SHARING
        if few or len(kinds) != 1 or len(precisions) != 1:
            return [update.orthogonalized() for update in updates]
        assert peers is not None
        owners = share(costs, peers.size)
        sizes = [update.param.numel() for update in updates]
        filled = [0] * peers.size
        starts = []
        for owner, size in zip(owners, sizes, strict=True):
            starts.append(filled[owner])
            filled[owner] += size
        bfloat16 = precisions == {"bfloat16"}
        dtype = torch.bfloat16 if bfloat16 else updates[0].param.dtype
        own = torch.zeros(max(filled), dtype=dtype, device=updates[0].param.device)
        for update, owner, start, size in zip(updates, owners, starts, sizes, strict=True):
            if owner == peers.rank:
                own[start : start + size] = update.orthogonalized().flatten()
        rows = peers.all_gather(own)
        return [
            rows[owner, start : start + size]
            for owner, start, size in zip(owners, starts, sizes, strict=True)
        ]

    def _adamw(self, group: Group, params: list[Tensor]) -> None:
        """torch's AdamW, for the parameters that are not orthogonalized."""
        vectors = [p for p in params if p.dim() <= 1]
        others = [p for p in params if p.dim() > 1]
        for members, decayed in ((others, True), (vectors, group["decay_1d"])):
            if not members:
                continue
            states = [self.state[p] for p in members]
            for param, state in zip(members, states, strict=True):
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
            beta1, beta2 = group["betas"]
            adamw(
                members,
                [p.grad for p in members if p.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                foreach=True,
                capturable=torch.compiler.is_compiling(),  # no reading of step counts
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=float(group["lr"]) * group["adamw_lr_ratio"],
                weight_decay=group["weight_decay"] if decayed else 0.0,
                eps=group["eps"],
                maximize=False,
            )


def share(costs: Sequence[float], workers: int) -> list[int]:
    """Assign each job to a worker: the most expensive first, each to the least busy worker."""
    busy, owners = [0.0] * workers, [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda job: -costs[job]):
        owners[job] = busy.index(min(busy))
        busy[owners[job]] += costs[job]
    return owners


def _check(params: Sequence[Tensor]) -> None:
    for param in params:
        assert param.grad is not None
        if hasattr(param, "placements"):
            raise ValueError(
                "Muon: the parameters are sharded, and it orthogonalizes whole matrices; use LAMB"
            )
        if param.grad.layout != torch.strided:
            raise ValueError(
                f"Muon needs dense gradients, got {param.grad.layout}: an embedding with "
                "sparse=True?"
            )
