"""TensorBoard: event files in the run's folder (`tensorboard --logdir runs`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dat.train.loggers.base import BY_EPOCH, Logger, RunInfo

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

EVENTS = "events"


class TensorBoard(Logger):
    package = "tensorboard"
    _events: SummaryWriter

    def begin(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(run.folder / EVENTS, purge_step=run.updates + 1)

    def log(self, values: Mapping[str, float], step: int, *, by: str = BY_EPOCH) -> None:
        for key, value in values.items():
            self._events.add_scalar(key, value, step)
        if by == BY_EPOCH:
            self._events.flush()

    def end(self, result: Mapping[str, Any] | None) -> None:
        self._events.close()
