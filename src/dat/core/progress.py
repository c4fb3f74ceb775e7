"""Progress of long work: a callback, or a bar on standard error."""

from __future__ import annotations

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

Progress = Callable[[int, int], None]
"""Called with the work done and the total work."""


def silent(done: int, total: int) -> None:
    """Report no progress."""


@contextmanager
def progress_bar(title: str, *, show: bool) -> Iterator[Progress]:
    """A progress bar whose total may change; yields a callback that takes the work done and the
    total."""
    console = Console(stderr=True, quiet=not show)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(compact=True))
    with Bar(*columns, *times, console=console, disable=not console.is_terminal) as bar:
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
