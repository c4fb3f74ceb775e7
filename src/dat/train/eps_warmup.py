"""A perturbation that grows during the first epochs, from 0 to the threat model's eps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dat.core.settings import SettingError, setting
from dat.train.part import Option, Part

if TYPE_CHECKING:
    from dat.objectives import Batch
    from dat.train.trainer import Trainer
    from dat.train.worker import Worker


@dataclass(frozen=True, kw_only=True)
class EpsWarmup(Option):
    """For how long eps grows. Held-out images are always attacked with the full eps."""

    epochs: float = setting(
        0.0,
        "initial epochs in which threat.eps grows linearly with every step, and step sizes of the "
        "attack in proportion; 0: none",
        ge=0,
        key="eps_warmup",
    )

    def check(self, trainer: Trainer) -> None:
        if self.epochs > trainer.epochs:
            raise SettingError(
                f"train.eps_warmup = {self.epochs:g}: must be at most train.epochs = "
                f"{trainer.epochs}"
            )

    def build(self, trainer: Trainer) -> EpsRamp:
        return EpsRamp(self, trainer)


class EpsRamp(Part):
    """Replaces the threat model of a batch."""

    def __init__(self, option: EpsWarmup, trainer: Trainer) -> None:
        self.option, self.trainer = option, trainer

    def on_batch(self, worker: Worker, batch: Batch, epoch: int, step: int) -> Batch:
        if epoch >= self.option.epochs:
            return batch
        progress = epoch + (step + 1) / self.trainer.steps_in(epoch)
        factor = min(progress / self.option.epochs, 1.0)
        return replace(batch, threat=replace(batch.threat, eps=factor * batch.threat.eps))
