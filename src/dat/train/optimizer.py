"""The trainer's optimizer: created by settings or by a function of the model, or the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from dat.core.settings import SettingError
from dat.distributed import BaseExchange, Peers
from dat.optim import Layerwise, Muon, OptimizerSettings

if TYPE_CHECKING:
    from dat.train.trainer import Trainer

TrainerOptimizer = (
    OptimizerSettings | torch.optim.Optimizer | Callable[[nn.Module], torch.optim.Optimizer]
)


def make_optimizer(trainer: Trainer) -> torch.optim.Optimizer:
    """Create the optimizer of the model's parameters, sharded or not."""
    given, model = trainer.optimizer, trainer.model
    if isinstance(given, type):
        raise TypeError(
            f"optimizer = {given.__name__}: is a class; pass settings (dat.LAMB(lr=0.05)), a "
            "function of the model, or an optimizer of its parameters"
        )
    if isinstance(given, torch.optim.Optimizer):
        optimizer = _of_model(given, model)
    elif isinstance(given, OptimizerSettings):
        optimizer = given(model, batch=trainer.batch)
    else:
        optimizer = given(model)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return optimizer


def connect_optimizer(optimizer: torch.optim.Optimizer, exchange: BaseExchange) -> None:
    """Give the optimizer access to the other workers, if its step needs them."""
    if isinstance(optimizer, Layerwise):
        optimizer.shards = exchange.shards
    if isinstance(optimizer, Muon):
        optimizer.peers = Peers(exchange.world, exchange.ledger)


def optimizer_sharding_conflict(trainer: Trainer) -> str:
    """Why the optimizer does not work with a sharded model, and an alternative."""
    if isinstance(trainer.optimizer, torch.optim.Optimizer):
        return (
            "the optimizer has the parameters of the unsharded model; use settings "
            "(dat.LAMB(lr=0.05)), or a function of the model"
        )
    if isinstance(trainer.optimizer, OptimizerSettings):
        return trainer.optimizer.sharding_conflict()
    return ""


def _of_model(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    own = {id(parameter) for parameter in model.parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if not all(id(parameter) in own for parameter in params):
        raise SettingError(
            "optimizer: has parameters that are not the model's; create it from those of the model "
            "that is trained"
        )
    return optimizer
