"""A model that is spread over the workers: what it does not go together with, and its weights
where one needs them whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dat.attacks import FGSM, NFGSM, PGD, Free, NoAttack
from dat.comm import (
    BaseExchange,
    Buckets,
    Chunked,
    Default,
    Dense,
    ShardedExchange,
    check_shard,
    local_of,
)
from dat.fields import SettingError
from dat.objectives import GradAlign

if TYPE_CHECKING:
    from dat.train.trainer import Trainer

STEADY = (NoAttack, FGSM, NFGSM, PGD, Free)
"""Attacks that ask the network equally often at every worker, and let it finish."""


def check_sharded(trainer: Trainer) -> None:
    """Refuse what does not work on a sharded model."""
    assert trainer.shard is not None
    check_shard(trainer.world.size, trainer.shard)
    reason = _quantization(trainer) or _method(trainer) or _computation(trainer)
    if reason:
        raise SettingError(f"comm.shard = {trainer.shard}: {reason}, or comm.shard none")


def _quantization(trainer: Trainer) -> str:
    quantizer, protocol = trainer.quantizer, trainer.protocol
    if not quantizer.dense and not isinstance(quantizer, Buckets):
        return "a step that is shared by parts of a layer cannot be; use quantizer.name bucket"
    if not quantizer.dense and quantizer.error_feedback:
        return "what rounding leaves over is not kept; use quantizer.error_feedback false"
    if not isinstance(protocol, Default | Dense | Chunked):
        return "its gradients are shared out, not sent to all; use protocol.name default"
    return ""


def _method(trainer: Trainer) -> str:
    attack = trainer.attack
    if not isinstance(attack, STEADY):
        return (
            f"attack {type(attack).__name__} may ask the network more often at one worker than at "
            "another, and they would wait for ever; use pgd, fgsm, n-fgsm, free or none"
        )
    if isinstance(attack, PGD) and (attack.patience is not None or attack.restarts > 1):
        return (
            "attack.patience and attack.restarts let images leave the batch, and a worker without "
            "any would keep the others waiting; use patience none and restarts 1"
        )
    if isinstance(trainer.objective, GradAlign):
        return "objective gradalign needs second derivatives, which torch has not; use another"
    if trainer.weight_attack.gamma:
        return "AWP moves whole weights; use train.awp 0"
    if trainer.team > 1:
        return "not for teams; use train.team 1"
    if trainer.bn != "local":
        return f"train.bn = {trainer.bn} replaces what torch has wrapped; use train.bn local"
    if trainer.growth.at:
        return "a batch that grows is computed in pieces; leave train.grow empty"
    return ""


def _computation(trainer: Trainer) -> str:
    compute = trainer.compute
    if compute.layout == "channels-last":
        return "torch cuts weights that lie channels first; use compute.layout auto"
    if compute.compile == "on":
        return "compiling is for a copy of the whole network; use compute.compile auto"
    if compute.pieces > 1:
        return "workers may have different numbers of pieces; use compute.pieces 1"
    return ""


def parts_alike(exchange: BaseExchange) -> int:
    """Every how many-th worker has the same weights."""
    return exchange.shards.size if isinstance(exchange, ShardedExchange) else 1


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in model.state_dict().items()}


def broken(exchange: BaseExchange, model: nn.Module) -> str | None:
    """The first of the model's tensors that is not finite; all workers see the same."""
    floating = {k: v for k, v in state_of(model).items() if v.is_floating_point()}
    bad = torch.stack([~local_of(it).isfinite().all() for it in floating.values()])
    if isinstance(exchange, ShardedExchange):
        bad = exchange.shards.total(bad.float()) > 0
    return list(floating)[int(bad.int().argmax())] if bad.any() else None
