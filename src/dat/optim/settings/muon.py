"""Muon's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dat.core.lazy import nn
from dat.core.settings import setting
from dat.optim.base import OptimizerSettings, parameter_groups

if TYPE_CHECKING:
    from torch import Tensor

    from dat.optim.muon import Muon


@dataclass(frozen=True, kw_only=True)
class MuonSettings(OptimizerSettings):
    """Orthogonalized momentum for matrices, AdamW for all other parameters."""

    lr: float = setting(1e-3, "peak learning rate eta", gt=0)
    weight_decay: float = setting(0.01, "decoupled weight decay", ge=0)
    momentum: float = setting(0.95, "momentum", ge=0, lt=1)
    nesterov: bool = setting(True, "Nesterov momentum")
    ns_steps: int = setting(5, "Newton-Schulz iterations", ge=1, le=99)
    adjust_lr_fn: str = setting(
        "match_rms_adamw",
        "scale of a matrix's update: match_rms_adamw, 0.2 sqrt(max(rows, columns)), so that "
        "AdamW's rate suits; original, sqrt(max(1, rows / columns))",
        choices=("match_rms_adamw", "original"),
    )
    precision: str = setting(
        "float32",
        "precision of the iterations; float32: that of the weights",
        choices=("float32", "bfloat16"),
    )
    head: str = setting(
        "adamw", "the optimizer of the last linear layer's matrix", choices=("adamw", "muon")
    )
    adamw_lr_ratio: float = setting(1.0, "AdamW's learning rate, relative to lr", gt=0)
    betas: tuple[float, float] = setting((0.9, 0.999), "decay rates of AdamW's moments", ge=0, lt=1)
    eps: float = setting(1e-8, "AdamW's term added to sqrt(v) for stability", gt=0)
    decay_1d: bool = setting(True, "apply weight decay to biases and BN parameters")

    def __call__(self, model: nn.Module, *, batch: int = 256) -> Muon:
        from dat.optim.muon import Muon

        groups = parameter_groups(
            model, lr=self.lr, weight_decay=self.weight_decay, decay_1d=self.decay_1d
        )
        return self.finish(Muon.of(self, self._separate(groups, model)))

    def _separate(self, groups: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
        """Give embeddings and the last linear layer, if it is AdamW's, a group of their own."""
        excluded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
        if self.head == "adamw" and linear:
            excluded.add(id(linear[-1].weight))

        def part(group: dict[str, Any], *, orthogonalize: bool) -> dict[str, Any]:
            params: list[Tensor] = group["params"]
            same = [p for p in params if (id(p) not in excluded) is orthogonalize]
            return {**group, "params": same, "orthogonalize": orthogonalize}

        parts = [part(group, orthogonalize=flag) for group in groups for flag in (True, False)]
        return [group for group in parts if group["params"]]

    def sharding_conflict(self) -> str:
        return (
            "Muon orthogonalizes whole matrices, and a worker has only some of their rows; use "
            "optimizer.name lamb"
        )
