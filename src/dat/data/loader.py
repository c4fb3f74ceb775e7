"""Batches ahead of time: pictures are decoded by processes of their own while the network works.

What a batch holds is a function of its number alone, so it does not matter how many processes there
are, nor where one begins: after a resume, at batch 0, or anywhere else.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from typing import Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

T = TypeVar("T")
AHEAD = 2
"""Batches that a process prepares before they are asked for."""


class Loader(Generic[T]):
    """`read(number)` for one number after the other, by so many processes; 0: by this one."""

    def __init__(self, read: Callable[[int], T], processes: int = 0) -> None:
        self.read, self.processes = read, processes
        self._coming: Iterator[T | _Failed] | None = None
        self._next = 0
        self._last: tuple[range, list[T]] | None = None

    def __call__(self, number: int) -> T:
        return self.several(range(number, number + 1))[0]

    def several(self, numbers: range) -> list[T]:
        """Batches that follow each other."""
        if self._last is None or numbers != self._last[0]:  # free AT asks for them again
            self._last = numbers, [self._get(number) for number in numbers]
        return self._last[1]

    def _get(self, number: int) -> T:
        if not self.processes:
            return self.read(number)
        if self._coming is None or number != self._next:
            self._coming = self._start(number)
        self._next = number + 1
        batch = next(self._coming)
        if isinstance(batch, _Failed):
            self.close()
            raise ValueError(batch.message)
        return batch

    def close(self) -> None:
        """Let the processes go."""
        self._coming = None

    def _start(self, number: int) -> Iterator[T | _Failed]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "dat.data.supply"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # more processes than cores: the user's choice
            return iter(
                DataLoader(
                    _Numbered(self.read),
                    batch_size=None,
                    sampler=_From(number),
                    num_workers=self.processes,
                    prefetch_factor=AHEAD,
                    multiprocessing_context=context,
                    pin_memory=torch.cuda.is_available(),
                    worker_init_fn=_end_with_the_parent,
                    generator=torch.Generator(),  # else it would draw from torch's global one
                )
            )


def _end_with_the_parent(number: int) -> None:
    """The fork server is this process's parent to the system, and does not end when the worker is
    killed; so the worker itself is watched."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _Failed:
    """What a process could not do; the loader's own way to tell would add its traceback."""

    def __init__(self, message: str) -> None:
        self.message = message


class _Numbered(Dataset[T]):
    def __init__(self, read: Callable[[int], T]) -> None:
        self.read = read

    def __getitem__(self, number: int) -> T | _Failed:  # type: ignore[override]
        try:
            return self.read(number)
        except (ValueError, OSError) as error:
            return _Failed(str(error))


class _From(Sampler[int]):
    """All numbers from one on."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[int]:
        return count(self.first)
