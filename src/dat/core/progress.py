"""Progress of long work: a callback, or a bar or lines on standard error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from dat.core.glossary import seconds

Progress = Callable[[int, int], None]
"""Called with the work done and the total work."""


def silent(done: int, total: int) -> None:
    """Report no progress."""


LINE_EVERY = 30.0
"""Seconds between lines where there is no terminal for a bar."""
Clock = Callable[[], float]


class Heartbeat:
    """Prints a line about the work done now and then."""

    def __init__(self, console: Console, title: str, clock: Clock) -> None:
        self._console, self._title, self._clock = console, title, clock
        self._start = self._last = clock()

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if now - self._last < LINE_EVERY:
            return
        self._last, elapsed = now, now - self._start
        left = f", about {seconds(elapsed * (total - done) / done)} left" if done else ""
        share = f"{100 * done / max(total, 1):.0f} %"
        line = f"{self._title}: {share} after {seconds(elapsed)}{left}"
        self._console.print(line, markup=False, soft_wrap=True)


@contextmanager
def progress_bar(title: str, *, show: bool, clock: Clock = time.monotonic) -> Iterator[Progress]:
    """A progress bar whose total may change; yields a callback that takes the work done and the
    total. Without a terminal it prints a line now and then."""
    console = Console(stderr=True, quiet=not show, highlight=False)
    if not console.is_terminal:
        yield Heartbeat(console, title, clock)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(compact=True))
    with Bar(*columns, *times, console=console) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def reporting(progress: Progress | bool, title: str, *, show: bool) -> Iterator[Progress]:
    """The callback of a caller who passed one, or that of a bar if `progress` is true."""
    if not isinstance(progress, bool):
        yield progress
        return
    with progress_bar(title, show=show and progress) as report:
        yield report
