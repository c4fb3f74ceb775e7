"""Subgroups of workers that hold the same images and divide the noisy copies of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dat import distributed
from dat.core.settings import setting
from dat.train.part import Option

if TYPE_CHECKING:
    from dat.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Subgroup(Option):
    """How many consecutive ranks share the work on an image."""

    size: int = setting(
        1,
        "size of subgroups that divide the noisy copies of an image (objective smooth, stability); "
        "must divide the number of workers",
        ge=1,
        key="team",
    )

    def check(self, trainer: Trainer) -> None:
        distributed.check_subgroup(trainer.world.size, self.size)
        trainer.objective.check_subgroup(self.size)

    def sharding_conflict(self) -> str:
        return "subgroups are not supported; use train.team 1" if self.size > 1 else ""
