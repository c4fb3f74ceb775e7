"""A model that is sharded over the workers (FSDP; HSDP if over groups of them)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dat import distributed
from dat.core.lazy import torch
from dat.core.settings import SettingError, Settings, setting
from dat.distributed import GATHER_CHOICES

if TYPE_CHECKING:
    from torch import nn

    from dat.distributed import BaseExchange
    from dat.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Sharding(Settings):
    """Over how many workers to shard, and how long to keep gathered weights."""

    size: int | None = setting(
        None,
        "number of consecutive ranks that the weights are sharded over (FSDP; HSDP if fewer than "
        "all workers); must divide the number of workers; none: no sharding",
        ge=1,
        key="shard",
    )
    gather: str = setting(
        "attack",
        "how long sharded weights stay gathered: attack, for the attack and the update's forward "
        "pass; block, one block at a time, with less memory and more communication",
        choices=GATHER_CHOICES,
    )

    @property
    def active(self) -> bool:
        """Whether each worker holds only a shard of the model."""
        return self.size is not None and self.size > 1

    def check(self, trainer: Trainer) -> None:
        """Refuse everything that does not support a sharded model."""
        if not self.active:
            return
        assert self.size is not None
        from dat.train.optimizer import optimizer_sharding_conflict

        distributed.check_shard(trainer.world.size, self.size)
        exchange = trainer.exchange
        conflicts = [
            exchange.quantizer.sharding_conflict(),
            exchange.protocol.sharding_conflict(),
            trainer.attack.sharding_conflict(),
            trainer.objective.sharding_conflict(),
            optimizer_sharding_conflict(trainer),
            *(option.sharding_conflict() for option in trainer.options.each()),
            trainer.compute.sharding_conflict(),
        ]
        if reason := next(filter(None, conflicts), ""):
            raise SettingError(f"comm.shard = {self.size}: {reason}, or comm.shard none")


def first_not_finite(exchange: BaseExchange, model: nn.Module) -> str | None:
    """The name of the model's first tensor that is not finite, the same on all workers."""
    state = {name: value.detach() for name, value in model.state_dict().items()}
    floating = {name: value for name, value in state.items() if value.is_floating_point()}
    values = [distributed.local_tensor(value) for value in floating.values()]
    bad = exchange.any_worker(torch.stack([~value.isfinite().all() for value in values]))
    return list(floating)[int(bad.int().argmax())] if bad.any() else None
