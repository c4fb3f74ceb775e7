"""Callbacks: notified of the events of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from dat.train.overfitting_monitor import Collapse
    from dat.train.records import EpochRecord
    from dat.train.step import StepReport
    from dat.train.trainer import Trainer

RENAMED = {
    "started": "on_fit_start",
    "step_ended": "on_step_end",
    "best_found": "on_new_best",
    "epoch_ended": "on_epoch_end",
    "collapsed": "on_collapse",
    "left_out_step": "on_step_skipped",
    "ended": "on_fit_end",
}
"""Old method names, and what they are called now."""


class Callback:
    """Notified of a run's events, on every worker. Every method is optional."""

    def on_fit_start(self, trainer: Trainer) -> None: ...
    def on_step_end(self, trainer: Trainer, epoch: int, report: StepReport) -> None: ...
    def on_new_best(self, trainer: Trainer, name: str, model: nn.Module) -> None: ...
    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None: ...
    def on_collapse(self, trainer: Trainer, collapse: Collapse) -> None: ...
    def on_step_skipped(self, trainer: Trainer, reason: str, count: int) -> None: ...
    def on_fit_end(self, trainer: Trainer) -> None: ...

    def should_stop(self) -> bool:
        """Whether to stop after this step. If one worker stops, all do."""
        return False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for old, new in RENAMED.items():
            if old in vars(cls):
                raise TypeError(f"{cls.__name__}.{old} is never called: rename it to {new}")
