"""A growing batch size (Smith et al. 2018, arXiv 1711.00489): larger batches, not a decaying
learning rate, reduce the gradient noise, and updates become fewer and larger."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dat.core.settings import SettingError, setting
from dat.train.part import Option

if TYPE_CHECKING:
    from dat.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class BatchSchedule(Option):
    """From each of these epochs on, an update takes `factor` times as many batches as before."""

    epochs: tuple[int, ...] = setting(
        (),
        "epochs after which the batch size grows, e.g. 10,15, instead of a learning rate decay; "
        "empty: never",
        ge=1,
        key="grow",
    )
    factor: int = setting(2, "growth factor of the batch size", ge=2, key="grow_by")

    def __post_init__(self) -> None:
        super().__post_init__()
        if list(self.epochs) != sorted(set(self.epochs)):
            raise SettingError(f"grow = {self._shown}: must increase")

    @property
    def _shown(self) -> str:
        return ", ".join(map(str, self.epochs))

    def batches(self, epoch: int) -> int:
        """Batches per update in an epoch, counted from 0."""
        return math.prod(self.factor for start in self.epochs if epoch >= start)

    def check(self, trainer: Trainer) -> None:
        """Refuse growth after the end of the run."""
        if self.epochs and self.epochs[-1] >= trainer.epochs:
            raise SettingError(
                f"train.grow = {self._shown}: must be below train.epochs = {trainer.epochs}"
            )

    def build(self, trainer: Trainer) -> BatchSchedule:
        """Refuse updates that are larger than an epoch."""
        most, batches = self.batches(trainer.epochs), trainer.batches.steps
        if most > batches:
            raise SettingError(
                f"train.grow = {self._shown}: the last updates would take {most} batches of "
                f"{trainer.batch}, but an epoch has only {batches}; grow less, or start from a "
                "smaller train.batch"
            )
        return self

    def sharding_conflict(self) -> str:
        if not self.epochs:
            return ""
        return "growing batches need micro-batches; leave train.grow empty"

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        return {"growth": [list(self.epochs), self.factor]}

    def load_state_dict(self, state: Mapping[str, Any], trainer: Trainer) -> None:
        """The schedule may change between epochs, but not in the middle of one."""
        epochs, factor = state.get("growth", [[], 2])
        before, epoch = BatchSchedule(epochs=tuple(epochs), factor=factor), len(state["records"])
        if state["tally"]["step"] and before.batches(epoch) != self.batches(epoch):
            raise ValueError(
                f"is in the middle of an epoch whose updates take {before.batches(epoch)} batches, "
                f"not {self.batches(epoch)}; do not change train.grow and train.grow_by"
            )
