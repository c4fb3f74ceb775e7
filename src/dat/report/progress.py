"""A bar over the whole run on a terminal, plain lines elsewhere."""

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

from dat.comm import World
from dat.train import EpochRecord, Listener, StepReport, Trainer
from dat.train.sentinel import Collapse

WIDE = 120
"""Columns from which on a bar has room beside what is told of a run."""


def _bar(console: Console, *, short: bool = False) -> Bar:
    """Of a long text there may be room for what is `short` only."""
    long = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    columns = (TaskProgressColumn(), TimeRemainingColumn(compact=True)) if short else long
    text = TextColumn("{task.description}")
    return Bar(text, *columns, console=console, disable=not console.is_terminal)


@contextmanager
def counting(title: str, total: int, *, show: bool) -> Iterator[Callable[[int], None]]:
    """A bar over `total` things; call what is given with how many more are done."""
    with _bar(Console(stderr=True, quiet=not show)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)


@contextmanager
def gauge(title: str, *, show: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar over work whose amount may turn out otherwise: call what is given with what is done and
    what there is."""
    console = Console(stderr=True, quiet=not show)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(compact=True))
    with Bar(*columns, *times, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class Progress(Listener):
    """Shows a run on standard error, so that standard output stays the result's."""

    def __init__(self, title: str = "training") -> None:
        self._console = Console(stderr=True, highlight=False)
        self._console.soft_wrap = not self._console.is_terminal  # in a file an epoch is one line
        self._title = title
        self._state = ""
        self._bar = _bar(self._console, short=self._console.width < WIDE)

    def started(self, trainer: Trainer) -> None:
        self._console.quiet = not trainer.world.first  # one voice for all workers
        workers = "1 worker" if trainer.world.size == 1 else f"{trainer.world.size} workers"
        self._console.print(
            f"{self._title}: {workers}, {trainer.samples} images, "
            f"{trainer.epochs} epochs of {trainer.steps_in(0)} steps, batch {trainer.batch}",
            markup=False,
        )
        for epoch in trainer.growth.at:
            self._console.print(
                f"from epoch {epoch + 1} on: {trainer.steps_in(epoch)} steps, batch "
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

    def step_ended(self, trainer: Trainer, epoch: int, report: StepReport) -> None:
        tally = trainer.tally
        seconds = max(tally.elapsed, 1e-9)
        images = trainer.batch_in(epoch) * tally.step
        rate, share = images / seconds, 100 * tally.traffic.busy / seconds
        now = (
            f"epoch {epoch + 1}/{trainer.epochs}  loss {report.loss:.3f}{self._state}  "
            f"{rate:,.0f} img/s  {share:.0f} % comm"
        )
        self._bar.update(self._task, advance=1, description=now)

    def epoch_ended(self, trainer: Trainer, record: EpochRecord) -> None:
        if record.holdout_ra is not None:
            self._state = f"  TA {record.holdout_ta:.1f}  RA {record.holdout_ra:.1f}"
        if not self._console.is_terminal:
            share = 100 * record.comm_seconds / record.seconds
            done = record.epoch - 1
            rate = trainer.batch_in(done) * trainer.steps_in(done) / record.seconds
            self._console.print(
                f"epoch {record.epoch}/{trainer.epochs}  loss {record.loss:.3f}{self._state}  "
                f"{rate:,.0f} img/s  {record.seconds:.2f} s, {share:.0f} % of it communicating",
                markup=False,
            )

    def collapsed(self, trainer: Trainer, collapse: Collapse) -> None:
        self._console.print(f"warning: {collapse}", markup=False)
        if collapse.back_to is not None:
            self._bar.update(self._task, completed=_steps_before(trainer, collapse.back_to))

    def left_out_step(self, trainer: Trainer, reason: str, count: int) -> None:
        self._console.print(f"warning: left out, {count} in all: {reason}", markup=False)

    def ended(self, trainer: Trainer) -> None:
        self._bar.stop()


def crowded(world: World, cores: int) -> str:
    """A word for those who take the times of workers that wait for a core for a cluster's."""
    if world.device.type != "cpu" or world.local_size <= cores:
        return ""
    return (
        f"note: {world.local_size} workers share {cores} core{'s' * (cores > 1)} and take turns: "
        "they are slower than fewer would be, and their times are not those of as many machines"
    )


def _steps_before(trainer: Trainer, epoch: int) -> int:
    """Updates of the epochs before one."""
    return sum(map(trainer.steps_in, range(epoch)))
