"""The base class of optimizer settings, and parameter groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any, Self, TypeVar

from dat.core.lazy import torch
from dat.core.settings import Settings, setting
from dat.optim.clip import clip_gradient

if TYPE_CHECKING:
    from torch import Tensor, nn

Made = TypeVar("Made", bound="torch.optim.Optimizer")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Settings, ABC):
    """The settings of an optimizer; called with a model, they return one."""

    lr: float = setting(0.01, "peak learning rate eta", gt=0)
    weight_decay: float = setting(1e-4, "weight decay", ge=0)
    clip: float | None = setting(
        None, "clip the gradient to this L2 norm over all parameters; none: no clipping", gt=0
    )

    @abstractmethod
    def __call__(self, model: nn.Module, *, batch: int = 256) -> torch.optim.Optimizer:
        """Return an optimizer of the model's trainable parameters; `batch` is the global batch
        size."""

    def sharding_conflict(self) -> str:
        """Why the optimizer does not work with a sharded model, and an alternative; empty if it
        does."""
        return ""

    def finish(self, optimizer: Made) -> Made:
        """Apply the settings that all optimizers share; every optimizer passes through here."""
        if self.clip is not None:
            clip_gradient(optimizer, self.clip)
        return optimizer


class TorchSettings(OptimizerSettings, ABC):
    """Settings of an optimizer that torch has already; there is no class of ours to construct."""

    def __new__(cls, *params: object, **options: object) -> Self:
        if params:
            raise TypeError(
                f"dat.{cls.__name__} holds settings, which create the optimizer when called with a "
                f"model; with parameters, use torch.optim.{cls.__name__.removeprefix('L')}"
            )
        return super().__new__(cls)


def parameter_groups(
    model: nn.Module, *, lr: float, weight_decay: float, decay_1d: bool, **vectors: Any
) -> list[dict[str, Any]]:
    """One group for weights, one for parameters of at most one dimension (biases, BN).

    `vectors` are options of the second group. `initial_lr` stores the peak learning rate, also in
    checkpoints, for `set_rate` and torch's schedulers.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    common = {"lr": lr, "initial_lr": lr}
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in trainable if p.dim() > 1],
            "weight_decay": weight_decay,
            **common,
        },
        {
            "params": [p for p in trainable if p.dim() <= 1],
            "weight_decay": weight_decay if decay_1d else 0.0,
            **common,
            **vectors,
        },
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ValueError(f"{type(model).__name__} has no trainable parameters")
    return groups


def scale_rates(
    optimizer: torch.optim.Optimizer, factors: Mapping[Tensor, float]
) -> torch.optim.Optimizer:
    """Scale the learning rate of each parameter by its factor, 1 by default, and split the groups
    accordingly.

    Groups with the highest factor come first, as the rate of the first group is reported.
    """
    split: list[tuple[float, dict[str, Any]]] = []
    for group in optimizer.param_groups:
        params, peak = group["params"], group.get("initial_lr", group["lr"])
        group_factors = [factors.get(parameter, 1.0) for parameter in params]
        for factor in dict.fromkeys(group_factors):
            rates = {"lr": group["lr"] * factor, "initial_lr": peak * factor}
            same = [other == factor for other in group_factors]
            split.append((factor, {**group, **_members(group, same), **rates}))
    split.sort(key=lambda pair: -pair[0])
    optimizer.param_groups[:] = [group for _, group in split]
    return optimizer


def _members(group: Mapping[str, Any], chosen: Iterable[bool]) -> dict[str, list[Any]]:
    """The chosen parameters of a group, with their names if it has them."""
    lists = {name: group[name] for name in ("params", "param_names") if name in group}
    return {name: list(compress(values, chosen)) for name, values in lists.items()}
