"""The ledger: bytes sent, counted from the tensors given to the process group, and seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from dat.core import devices
from dat.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from dat.distributed.world import World


class Traffic(NamedTuple):
    """What one worker sent, and how long that took, since the ledger was last read."""

    sent: int
    """Bytes this worker sent."""
    busy: float
    """Seconds during which at least one transfer was in progress, including the wait for slower
    workers: the paper's C. Part of this time is hidden behind the backward pass."""
    exposed: float
    """Seconds at the end of backward passes during which this worker only waited for transfers. On
    a GPU the host runs ahead of the device, so this is only a rough figure."""
    inter_node: int = 0
    """Of the bytes sent, those that went to another node."""

    def plus(self, other: Traffic) -> Traffic:
        """The sum of two consecutive readings."""
        return Traffic(
            self.sent + other.sent,
            self.busy + other.busy,
            self.exposed + other.exposed,
            self.inter_node + other.inter_node,
        )


class SentBytes(NamedTuple):
    """Bytes that one worker sent."""

    sent: int
    inter_node: int = 0
    """Of these, the bytes that went to another node."""

    def plus(self, other: SentBytes) -> SentBytes:
        return SentBytes(self.sent + other.sent, self.inter_node + other.inter_node)


def to_all_others(message: Tensor, world: World) -> SentBytes:
    """What one worker sends when every other worker gets a message of this size from it."""
    return SentBytes(
        (world.size - 1) * message.nbytes, (world.size - world.local_size) * message.nbytes
    )


def around_ring(tensor: Tensor, world: World) -> SentBytes:
    """What one worker sends in a ring all-reduce over all workers. The ring passes through one node
    after the other: only the last worker of a node sends to another node."""
    sent = ring_bytes(tensor.nbytes, world.size)
    leaves = world.local_rank + 1 == world.local_size < world.size
    return SentBytes(sent, sent if leaves else 0)


def ring_bytes(size: int, workers: int) -> int:
    """What one worker sends in a ring all-reduce of `size` bytes: each of M chunks is passed on
    M - 1 times to be summed and M - 1 times to be distributed."""
    return 2 * (workers - 1) * size // workers


class Ledger:
    """Counts transfers where collectives are issued. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self._lock = threading.Lock()
        self._sent = self._inter_node = 0
        self._exposed = 0.0
        self._transfers: list[tuple[object, object]] = []

    def start_transfer(self) -> Callable[..., None]:
        """Record the start of a transfer.

        When it ends, call the returned function with the bytes sent, in total and to other nodes.
        """
        start = self._clock.mark()

        def finish(sent: int, inter_node: int = 0) -> None:
            end = self._clock.mark()
            with self._lock:
                self._sent += sent
                self._inter_node += inter_node
                self._transfers.append((start, end))

        return finish

    def add_exposed(self, seconds: float) -> None:
        """Add seconds during which this worker only waited for transfers."""
        self._exposed += seconds

    def read_and_reset(self) -> Traffic:
        """The traffic since the last call. Unfinished transfers count in a later reading."""
        with self._lock:
            intervals = [self._clock.seconds(start, end) for start, end in self._transfers]
            traffic = Traffic(self._sent, union_length(intervals), self._exposed, self._inter_node)
            self._sent, self._inter_node, self._exposed, self._transfers = 0, 0, 0.0, []
            self._clock.restart()
        return traffic


def clock_of(device: torch.device) -> Clock:
    """The clock that times work on this device."""
    return EventClock(device) if devices.is_accelerator(device) else Clock()


def union_length(intervals: list[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, covered_until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return total


class Clock:
    """The host's clock: on the CPU a transfer ends when its callback runs."""

    def mark(self) -> object:
        """The current time, as an opaque mark for `seconds`."""
        return time.perf_counter()

    def seconds(self, start: object, end: object) -> tuple[float, float]:
        """Two marks in seconds since a common origin; waits until `end` has passed."""
        assert isinstance(start, float) and isinstance(end, float)
        return start, end

    def restart(self) -> None:
        """Move the origin to now."""


class EventClock(Clock):
    """Events on the stream, because the host runs ahead of the device.

    `elapsed_time` is in milliseconds with 24 significant bits: it resolves microseconds within
    seconds, but only milliseconds after five hours. So the origin moves with every reading.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        self._origin = self.mark()

    def mark(self) -> object:
        return devices.record_event(self._device, timed=True)

    def seconds(self, start: object, end: object) -> tuple[float, float]:
        origin: Any = self._origin
        end.synchronize()  # type: ignore[attr-defined]
        return origin.elapsed_time(start) / 1e3, origin.elapsed_time(end) / 1e3
