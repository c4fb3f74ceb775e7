"""TensorBoard: event files in the run's folder (`tensorboard --logdir runs`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dat.train.loggers.base import BY_EPOCH, Logger, RunInfo, numbers

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

EVENTS = "events"
COMPARED = ("result/ta", "result/ra")
"""The metrics in the table of runs (HPARAMS)."""


class TensorBoard(Logger):
    """Settings and result are texts, and columns in the table of runs."""

    package = "tensorboard"
    _events: SummaryWriter

    def begin(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._events = SummaryWriter(run.folder / EVENTS, purge_step=run.updates + 1)
        settings = {key: _plain(value) for key, value in run.settings().items()}
        self._events.add_text("settings", _table(settings), 0)
        *beginning, self._end = hparams(settings, dict.fromkeys(COMPARED))
        self._write(*beginning)
        self._events.flush()

    def log(self, values: Mapping[str, float], step: int, *, by: str = BY_EPOCH) -> None:
        for key, value in values.items():
            self._events.add_scalar(key, value, step)
        if by == BY_EPOCH:
            self._events.flush()

    def end(self, result: Mapping[str, Any] | None) -> None:
        if result is not None:
            self._events.add_text("result", _table(result), 0)
            self.log({f"result/{key}": value for key, value in numbers(result).items()}, 0)
            self._write(self._end)
        self._events.close()

    def _write(self, *summaries: Any) -> None:
        """Write the hyperparameter summary; `SummaryWriter.add_hparams` would open another
        folder."""
        writer = self._events._get_file_writer()
        for summary in summaries:
            writer.add_summary(summary)


def _plain(value: object) -> str | float | bool:
    """A value that TensorBoard takes: a number, a truth value or a text."""
    if value is None:
        return "none"
    return value if isinstance(value, str | float | int) else str(value)


def _table(values: Mapping[str, object]) -> str:
    """A table in Markdown."""
    rows = (f"| {key} | {value} |".replace("\n", " ") for key, value in values.items())
    return "\n".join(("| name | value |", "| --- | --- |", *rows))
