"""Prefetch batches: loader processes decode pictures while the network trains.

A batch is a function of its number alone, so neither the number of processes nor the first batch,
for example after a resume, changes what it contains.
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
PREFETCH = 2
"""Batches that each process prepares in advance."""


class Loader(Generic[T]):
    """Calls `read(number)` for consecutive numbers in `processes` processes; 0: in this one."""

    def __init__(self, read: Callable[[int], T], processes: int = 0, *, pin: bool = False) -> None:
        """With `pin`, batches are in page-locked memory."""
        self.read, self.processes, self.pin = read, processes, pin
        self._stream: Iterator[T | _ReadError] | None = None
        self._next = 0
        self._last: tuple[range, list[T]] | None = None

    def __call__(self, number: int) -> T:
        return self.read_range(range(number, number + 1))[0]

    def read_range(self, numbers: range) -> list[T]:
        """Consecutive batches."""
        if self._last is None or numbers != self._last[0]:  # free AT repeats a batch
            self._last = numbers, [self._get(number) for number in numbers]
        return self._last[1]

    def _get(self, number: int) -> T:
        if not self.processes:
            return self.read(number)
        if self._stream is None or number != self._next:
            self._stream = self._start(number)
        self._next = number + 1
        batch = next(self._stream)
        if isinstance(batch, _ReadError):
            self.close()
            raise ValueError(batch.message)
        return batch

    def close(self) -> None:
        """Stop the processes."""
        self._stream = None

    def _start(self, number: int) -> Iterator[T | _ReadError]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "dat.data.batches"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # more processes than cores is the user's choice
            return iter(
                DataLoader(
                    _BatchDataset(self.read),
                    batch_size=None,
                    sampler=_CountFrom(number),
                    num_workers=self.processes,
                    prefetch_factor=PREFETCH,
                    multiprocessing_context=context,
                    pin_memory=self.pin,
                    worker_init_fn=_exit_with_parent,
                    generator=torch.Generator(),  # leaves torch's global generator alone
                )
            )


def _exit_with_parent(number: int) -> None:
    """Exit when the training process does.

    To the operating system the fork server is the parent, and it survives when the training
    process is killed.
    """

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _ReadError:
    """An error in a loader process, without the traceback that DataLoader would add."""

    def __init__(self, message: str) -> None:
        self.message = message


class _BatchDataset(Dataset[T]):
    def __init__(self, read: Callable[[int], T]) -> None:
        self.read = read

    def __getitem__(self, number: int) -> T | _ReadError:  # type: ignore[override]
        try:
            return self.read(number)
        except (ValueError, OSError) as error:
            return _ReadError(str(error))


class _CountFrom(Sampler[int]):
    """All numbers from `first` on."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[int]:
        return count(self.first)
