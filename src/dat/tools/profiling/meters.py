"""Meters for the stages of a step: time, memory, and ranges in torch's profiler."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function

from dat.core import devices
from dat.tools.bench import memory

REST = "rest"
"""The stage of everything outside of all stages."""


def nothing() -> None:
    """Synchronization on the CPU, which runs synchronously."""


class Meter(ABC):
    """Charges each stage for itself, without the stages nested in it, so that stages add up."""

    def __init__(self) -> None:
        self._path: list[str] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._charge(self._stage)
        self._path.append(name)
        try:
            yield
        finally:
            self._charge(self._stage)
            self._path.pop()

    def step_ended(self) -> None:
        """Charge what happened since the last stage to the rest."""
        self._charge(self._stage)

    @property
    def _stage(self) -> str:
        return "/".join(self._path) or REST

    @abstractmethod
    def _charge(self, stage: str) -> None: ...


class Stopwatch(Meter):
    """The seconds of every stage of every step."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        synchronize: Callable[[], None] = nothing,
    ) -> None:
        super().__init__()
        self._clock, self._synchronize = clock, synchronize
        self.laps: list[dict[str, float]] = []
        self._lap: dict[str, float] = defaultdict(float)
        self._since = clock()

    def _charge(self, stage: str) -> None:
        self._synchronize()
        now = self._clock()
        self._lap[stage] += now - self._since
        self._since = now

    def step_ended(self) -> None:
        super().step_ended()
        self.laps.append(dict(self._lap))
        self._lap.clear()

    def skip(self) -> None:
        """Ignore what happened since the last step."""
        self._synchronize()
        self._since = self._clock()


class MemoryMeter(Meter):
    """The memory of every stage in bytes: its growth, summed over all steps, and its peak above the
    memory before the first step."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device if devices.is_accelerator(device) else None
        self.has_peaks = self._reset()
        self._base = self._last = self._now()
        self.highest: dict[str, int] = defaultdict(int)
        self.grown: dict[str, int] = defaultdict(int)

    def _charge(self, stage: str) -> None:
        now = self._now()
        self.grown[stage] += now - self._last
        self.highest[stage] = max(self.highest[stage], self._peak() - self._base)
        self._last = now
        self._reset()

    def _reset(self) -> bool:
        if self._device is None:
            return memory.reset_peak()
        devices.reset_peak_memory(self._device)
        return True

    def _peak(self) -> int:
        return devices.peak_memory(self._device) if self._device else memory.peak()

    def _now(self) -> int:
        return devices.allocated_memory(self._device) if self._device else memory.resident()


@contextmanager
def trace(name: str) -> Iterator[None]:
    """Show the stage as a range in torch's profiler."""
    with record_function(name):
        yield
