"""Progress: on a terminal a bar, with lines about epochs above it; elsewhere lines only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from dat.core import devices
from dat.core.glossary import legend, plural
from dat.distributed import World
from dat.train import Callback, EpochRecord, StepReport, Trainer
from dat.train.overfitting_monitor import Collapse

WIDE = 120
"""Terminal width from which on there is room for a full bar next to the metrics."""

EPOCH_LINES = 40
"""Lines about epochs that a terminal shows, about."""


def _bar(console: Console, *, short: bool = False, transient: bool = False) -> Bar:
    """A progress bar; `short` leaves room for a long description, `transient` removes it when it is
    finished."""
    full = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    columns = (TaskProgressColumn(), TimeRemainingColumn(compact=True)) if short else full
    text = TextColumn("{task.description}")
    off = not console.is_terminal
    return Bar(text, *columns, console=console, disable=off, transient=transient)


@contextmanager
def counting(title: str, total: int, *, show: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar over `total` items; yields a callback that takes the number just done."""
    with _bar(Console(stderr=True, quiet=not show)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda number: bar.advance(task, number)


class Progress(Callback):
    """Shows progress on standard error, which leaves standard output to the result."""

    def __init__(self, title: str = "training", console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._console.soft_wrap = not self._console.is_terminal  # one line per epoch in a file
        self._title = title
        self._state = ""
        self._hidden: dict[int, str] = {}
        """The lines of epochs that were not shown."""
        narrow = self._console.width < WIDE
        self._bar = _bar(self._console, short=narrow, transient=True)  # the epochs' lines stay

    def on_fit_start(self, trainer: Trainer) -> None:
        self._console.quiet = not trainer.world.first  # only the first worker prints
        self._console.print(
            f"{self._title}: {plural(trainer.world.size, 'worker')}, {trainer.samples} images, "
            f"{plural(trainer.epochs, 'epoch')} of {plural(trainer.steps_in(0), 'step')}, "
            f"batch {trainer.batch}",
            markup=False,
        )
        for epoch in trainer.options.batch_schedule.epochs:
            self._console.print(
                f"from epoch {epoch + 1} on: {plural(trainer.steps_in(epoch), 'step')}, batch "
                f"{trainer.batch_in(epoch)}",
                markup=False,
            )
        self._console.print(f"computes: {', '.join(trainer.worker.engine.notes)}", markup=False)
        if note := crowded(trainer.world, os.cpu_count() or 1):
            self._console.print(note, markup=False)
        self._bar.start()
        done = _steps_before(trainer, len(trainer.records)) + trainer.tally.step
        total = _steps_before(trainer, trainer.epochs)
        self._task = self._bar.add_task("starting", total=total, completed=done)

    def on_step_end(self, trainer: Trainer, epoch: int, report: StepReport) -> None:
        tally = trainer.tally
        seconds = max(tally.elapsed, 1e-9)
        images = trainer.batch_in(epoch) * tally.step
        rate, share = images / seconds, 100 * tally.traffic.busy / seconds
        now = (
            f"epoch {epoch + 1}/{trainer.epochs}  loss {report.loss:.3f}{self._state}  "
            f"{rate:,.0f} img/s  {share:.0f} % comm"
        )
        self._bar.update(self._task, advance=1, description=now)

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        if record.holdout_ra is not None:
            if not self._state:
                terms = legend(["TA", "RA"], RA="both in %, on held-out images")
                self._console.print(terms, markup=False)
            self._state = f"  TA {record.holdout_ta:.1f}  RA {record.holdout_ra:.1f}"
        line = self._line(trainer, record)
        every = -(-trainer.epochs // EPOCH_LINES) if self._console.is_terminal else 1
        if record.epoch % every == 0 or record.epoch in (1, trainer.epochs):
            self._console.print(line, markup=False)
        else:
            self._hidden[record.epoch] = line

    def _line(self, trainer: Trainer, record: EpochRecord) -> str:
        share = 100 * record.comm_seconds / record.seconds
        done = record.epoch - 1
        rate = trainer.batch_in(done) * trainer.steps_in(done) / record.seconds
        return (
            f"epoch {record.epoch}/{trainer.epochs}  loss {record.loss:.3f}{self._state}  "
            f"{rate:,.0f} img/s  {record.seconds:.2f} s, {share:.0f} % communication"
        )

    def on_collapse(self, trainer: Trainer, collapse: Collapse) -> None:
        self._console.print(f"warning: {collapse}", markup=False)
        if collapse.back_to is not None:
            self._bar.update(self._task, completed=_steps_before(trainer, collapse.back_to))

    def on_step_skipped(self, trainer: Trainer, reason: str, count: int) -> None:
        self._console.print(f"warning: skipped, {count} in total: {reason}", markup=False)

    def on_fit_end(self, trainer: Trainer) -> None:
        best = self._hidden.get(trainer.best_epoch() or 0)
        if best:
            self._console.print(f"best: {best}", markup=False)
        self._bar.stop()


def crowded(world: World, cores: int) -> str:
    """A note if workers share cores, as their times then say nothing about a cluster."""
    if devices.is_accelerator(world.device) or world.local_size <= cores:
        return ""
    return (
        f"note: {world.local_size} workers share {cores} core{'s' * (cores > 1)}: fewer workers "
        "would be faster, and these times do not carry over to a cluster"
    )


def _steps_before(trainer: Trainer, epoch: int) -> int:
    """The number of steps before an epoch."""
    return sum(map(trainer.steps_in, range(epoch)))
