"""Sends a run's metrics to its loggers, after every step and every epoch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dat.train.callbacks import Callback
from dat.train.log import log
from dat.train.loggers import Logger
from dat.train.loggers.base import BY_EPOCH, BY_STEP, RunInfo
from dat.train.records import EpochRecord
from dat.train.step import StepReport

if TYPE_CHECKING:
    from dat.train.trainer import Trainer


class Logged(Callback):
    """Sends a run's metrics to loggers; only rank 0 has one.

    A logger that cannot start stops the run at once. One that fails later, because its server is
    down or the disk is full, is dropped with a warning, as metrics.jsonl has all metrics.
    """

    def __init__(
        self,
        folder: Path,
        loggers: Sequence[Logger],
        config: Mapping[str, Any] | None = None,
        *,
        result_follows: bool = False,
    ) -> None:
        self.folder, self.loggers, self.config = folder, list(loggers), config or {}
        self.result_follows = result_follows
        """Keep loggers open after training, until `close` is called with the final metrics."""
        self._open: list[Logger] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        self._steps = trainer.updates
        run = RunInfo(folder=self.folder, config=self.config, updates=self._steps)
        for logger in self.loggers:
            try:
                logger.begin(run)
            except Exception as error:
                self.close()
                raise ValueError(f"train.log: {_describe(logger, error)}") from error
            self._open.append(logger)

    def on_step_end(self, trainer: Trainer, epoch: int, report: StepReport) -> None:
        """Log the global loss and accuracy, and rank 0's own traffic."""
        self._steps += 1
        traffic = report.traffic
        values = {
            "step/loss": report.loss,
            "step/train_ra": report.accuracy,
            "step/sent": traffic.sent,
            "step/busy": traffic.busy,
            "step/exposed": traffic.exposed,
            "step/between": traffic.inter_node,
        }
        self._each(lambda logger: logger.log(values, self._steps, by=BY_STEP))

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        fields = record._asdict().items()
        values = {key: value for key, value in fields if isinstance(value, int | float)}
        ratios = (record.trust_ratios or {}).items()
        values |= {f"trust_ratio/{name}": ratio for name, ratio in ratios}
        self._each(lambda logger: logger.log(values, record.epoch, by=BY_EPOCH))

    def on_fit_end(self, trainer: Trainer) -> None:
        if not self.result_follows:
            self.close()

    def close(self, result: Mapping[str, Any] | None = None) -> None:
        """Close all loggers with the final metrics, or None if the run was cut off. Further calls
        do nothing."""
        self._each(lambda logger: logger.end(result))
        self._open.clear()

    def _each(self, call: Callable[[Logger], None]) -> None:
        for logger in list(self._open):
            try:
                call(logger)
            except Exception as error:
                self._open.remove(logger)
                message = f"logging stopped for {_describe(logger, error)}"
                log.warning(message)
                print(message, file=sys.stderr)


def _describe(logger: Logger, error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(logger).__name__}: {text}"
