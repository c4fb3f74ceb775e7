"""Which images batch normalization takes its statistics from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dat import distributed
from dat.core.settings import SettingError, setting
from dat.distributed import BATCH_NORM_SCOPES
from dat.train.part import Option

if TYPE_CHECKING:
    from dat.distributed import Ledger, ScopedBatchNorm, WorkerSubgroup, World
    from dat.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class BatchNormScope(Option):
    """Statistics of a worker's share of the batch, of the global batch, or of smaller groups."""

    scope: str = setting(
        "local",
        "images that share batch norm statistics: local, a worker's share of the batch; sync, the "
        "global batch; ghost, groups of at most train.ghost images",
        choices=BATCH_NORM_SCOPES,
        key="bn",
    )
    ghost: int = setting(32, "maximum number of images in a group of train.bn ghost", ge=2)

    @property
    def synchronized(self) -> bool:
        return self.scope == "sync"

    def check(self, trainer: Trainer) -> None:
        size = trainer.options.subgroup.size
        if self.scope == "ghost" and size > 1:
            raise SettingError(
                f"train.bn = ghost: the copies of an image in a subgroup (train.team = {size}) "
                "must share their statistics; use local or sync"
            )

    def sharding_conflict(self) -> str:
        if self.scope == "local":
            return ""
        return f"train.bn = {self.scope} replaces modules that torch wraps; use train.bn local"

    def norms(self, subgroup: WorkerSubgroup, world: World, ledger: Ledger) -> ScopedBatchNorm:
        """What replaces a model's batch norms during a pass."""
        return distributed.ScopedBatchNorm.of(
            self.scope, subgroup, world=world, ledger=ledger, group=self.ghost
        )
