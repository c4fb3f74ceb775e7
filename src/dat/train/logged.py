"""A run's figures, step by step and epoch by epoch, for its loggers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dat.loggers import Logger
from dat.loggers.base import BY_EPOCH, BY_STEP, Run
from dat.train.log import log
from dat.train.records import EpochRecord, Listener
from dat.train.step import StepReport

if TYPE_CHECKING:
    from dat.train.trainer import Trainer


class Logged(Listener):
    """Tells loggers of a run; only the first worker holds one.

    A logger that cannot begin stops the run before it costs anything. One that fails later, because
    its server is gone or a disk is full, is dropped with a word: a run is worth more than its
    charts, and metrics.jsonl has the figures.
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
        """Loggers stay open after training, until `close` has the final figures for them."""
        self._begun: list[Logger] = []

    def started(self, trainer: Trainer) -> None:
        self._steps = trainer.updates
        run = Run(folder=self.folder, config=self.config, updates=self._steps)
        for logger in self.loggers:
            try:
                logger.begin(run)
            except Exception as error:
                self.close()
                raise ValueError(f"train.log: {_told(logger, error)}") from error
            self._begun.append(logger)

    def step_ended(self, trainer: Trainer, epoch: int, report: StepReport) -> None:
        """The first worker's own traffic, step by step."""
        self._steps += 1
        values = {f"step/{key}": value for key, value in report.traffic._asdict().items()}
        self._each(lambda logger: logger.log(values, self._steps, by=BY_STEP))

    def epoch_ended(self, trainer: Trainer, record: EpochRecord) -> None:
        told = record._asdict().items()
        values = {key: value for key, value in told if isinstance(value, int | float)}
        ratios = (record.trust_ratios or {}).items()
        values |= {f"trust_ratio/{name}": ratio for name, ratio in ratios}
        self._each(lambda logger: logger.log(values, record.epoch, by=BY_EPOCH))

    def ended(self, trainer: Trainer) -> None:
        if not self.result_follows:
            self.close()

    def close(self, result: Mapping[str, Any] | None = None) -> None:
        """The final figures, or none if there are none; what was closed stays so."""
        self._each(lambda logger: logger.end(result))
        self._begun.clear()

    def _each(self, tell: Callable[[Logger], None]) -> None:
        for logger in list(self._begun):
            try:
                tell(logger)
            except Exception as error:
                self._begun.remove(logger)
                message = f"no more figures for {_told(logger, error)}"
                log.warning(message)
                print(message, file=sys.stderr)


def _told(logger: Logger, error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(logger).__name__}: {text}"
