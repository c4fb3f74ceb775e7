"""Collectives whose tensors outlive the backend's use of them.

gloo's threads release a collective's tensors, and the callbacks of its future, after the waiting
thread has been woken. The last one to release an object of Python needs the GIL; a thread that asks
for it while the interpreter exits is ended by force, which aborts the process ("terminate called
without an active exception"). So every collective works on aliases of its tensors, which are kept
here until nothing in C++ refers to them any more.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

T = TypeVar("T")

EXIT_TIMEOUT = 10.0
"""Seconds that the interpreter's exit waits for the backend to release what it still holds."""


class InFlight:
    """The tensors, and futures, that a backend may still refer to."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[Tensor, ...], object]] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            self._entries = [entry for entry in self._entries if _in_use(entry[0])]
            return len(self._entries)

    def hold(self, *aliases: Tensor, future: object = None) -> None:
        """Keep the tensors of a collective, and its future, until the backend has released them."""
        len(self)
        with self._lock:
            self._entries.append((aliases, future))

    def drain(self) -> None:
        """Wait until the backend has released everything, at most `EXIT_TIMEOUT` seconds."""
        deadline = time.monotonic() + EXIT_TIMEOUT
        while len(self) and time.monotonic() < deadline:
            time.sleep(0.001)  # gives the GIL to the threads that wait for it


def _in_use(aliases: tuple[Tensor, ...]) -> bool:
    """Whether C++ refers to one of them; Python's own references count as one."""
    return any(alias._use_count() > 1 for alias in aliases)  # type: ignore[attr-defined]


IN_FLIGHT = InFlight()
atexit.register(IN_FLIGHT.drain)


class PendingCollective(NamedTuple):
    """A collective that has been started."""

    work: dist.Work
    aliases: tuple[Tensor, ...]

    def wait(self) -> None:
        """Wait for the result; raises the error of a failed collective."""
        self.work.wait()

    def then(self, callback: Callable[[Future[Any]], T]) -> Future[T]:
        """Call `callback` with the finished collective's future, in a thread of the backend."""
        future = self.work.get_future().then(callback)
        IN_FLIGHT.hold(*self.aliases, future=future)
        return future


def start_all_reduce(
    tensor: Tensor, group: Any = None, op: Any = dist.ReduceOp.SUM
) -> PendingCollective:
    """Start to reduce over the group, in place."""
    alias = tensor.detach()
    IN_FLIGHT.hold(alias)
    return PendingCollective(dist.all_reduce(alias, op, group=group, async_op=True), (alias,))


def start_all_gather(
    tensor: Tensor, size: int, group: Any = None
) -> tuple[Tensor, PendingCollective]:
    """Start to gather the tensors of all `size` workers of the group: one row per rank."""
    rows = tensor.new_empty((size, *tensor.shape))
    own, views = tensor.detach(), rows.unbind()
    IN_FLIGHT.hold(own, *views)
    work = dist.all_gather(list(views), own, group=group, async_op=True)
    return rows, PendingCollective(work, (own, *views))


def start_all_gather_single(output: Tensor, tensor: Tensor, group: Any = None) -> PendingCollective:
    """Start to gather the tensors of all workers of the group into one, one after the other."""
    gathered, own = output.detach(), tensor.detach()
    IN_FLIGHT.hold(gathered, own)
    work = dist.all_gather_single(gathered, own, group=group, async_op=True)
    return PendingCollective(work, (gathered, own))


def all_reduce(tensor: Tensor, group: Any = None, op: Any = dist.ReduceOp.SUM) -> None:
    """Reduce over the group, in place, and wait."""
    start_all_reduce(tensor, group, op).wait()


def all_gather(tensor: Tensor, size: int, group: Any = None) -> Tensor:
    """The tensors of all `size` workers of the group, one row per rank."""
    rows, gather = start_all_gather(tensor, size, group)
    gather.wait()
    return rows
