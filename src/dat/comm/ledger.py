"""The ledger: bytes sent, from the tensors handed to the process group, and measured seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch


class Traffic(NamedTuple):
    """What one worker's exchanges came to since the last reading."""

    sent: int
    """Bytes this worker sent."""
    busy: float
    """Seconds during which at least one exchange was under way, waiting for slower peers included:
    the paper's C. Part of them is hidden behind the backward pass."""
    exposed: float
    """Seconds at the end of backward passes in which nothing but the exchange was left to do. On
    CUDA the host runs ahead of the device, so there it is only a rough figure."""
    between: int = 0
    """Of the bytes sent, those that went to another node."""

    def plus(self, other: Traffic) -> Traffic:
        """Of two readings that follow each other."""
        return Traffic(
            self.sent + other.sent,
            self.busy + other.busy,
            self.exposed + other.exposed,
            self.between + other.between,
        )


class Load(NamedTuple):
    """Bytes that a worker handed over."""

    sent: int
    between: int = 0
    """Of these, to another node."""

    def plus(self, other: Load) -> Load:
        return Load(self.sent + other.sent, self.between + other.between)


class Ledger:
    """Entries are made where collectives are issued; `close` reads them out and starts anew."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self._lock = threading.Lock()
        self._sent = self._between = 0
        self._exposed = 0.0
        self._flights: list[tuple[object, object]] = []

    def open_flight(self) -> Callable[..., None]:
        """An exchange begins; call what is returned, with the bytes sent (all of them, and those to
        other nodes), when it has ended."""
        start = self._clock.mark()

        def land(sent: int, between: int = 0) -> None:
            end = self._clock.mark()
            with self._lock:
                self._sent += sent
                self._between += between
                self._flights.append((start, end))

        return land

    def expose(self, seconds: float) -> None:
        self._exposed += seconds

    def close(self) -> Traffic:
        with self._lock:
            flights = [self._clock.seconds(start, end) for start, end in self._flights]
            traffic = Traffic(self._sent, covered(flights), self._exposed, self._between)
            self._sent, self._between, self._exposed, self._flights = 0, 0, 0.0, []
        return traffic


def clock_of(device: torch.device) -> Clock:
    """A clock for what is computed there."""
    return _CudaClock() if device.type == "cuda" else Clock()


def covered(intervals: list[tuple[float, float]]) -> float:
    """The length of the union of some intervals."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


class Clock:
    """The host's clock: on CPU an exchange ends when its callback runs."""

    def mark(self) -> object:
        """This moment, to be read later."""
        return time.perf_counter()

    def seconds(self, start: object, end: object) -> tuple[float, float]:
        """Two moments on one scale, which may have to be waited for."""
        assert isinstance(start, float) and isinstance(end, float)
        return start, end


class _CudaClock(Clock):
    """Events on the stream: on CUDA the host runs ahead of the exchange."""

    def __init__(self) -> None:
        self._zero = torch.cuda.Event(enable_timing=True)
        self._zero.record()

    def mark(self) -> object:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: object, end: object) -> tuple[float, float]:
        assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
        end.synchronize()
        return self._zero.elapsed_time(start) / 1e3, self._zero.elapsed_time(end) / 1e3
