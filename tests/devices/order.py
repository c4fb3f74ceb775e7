"""Whether the workers' collectives match, whatever the order in which their threads run.

A backend pairs the n-th collective of a process group on one worker with the n-th on the others.
On GPUs that is not enough: a collective of NCCL occupies the device until all members of its group
have started it, so two groups whose collectives are enqueued in different orders on two workers
wait for each other forever.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from dat.distributed import exchange, reducer
from dat.train import checkpointer
from tests.devices.echo_group import P2P, Collective

Logs = Mapping[int, Sequence[Collective]]
"""What each worker has issued, in order."""


def first_mismatch(logs: Logs) -> str:
    """Where a group's collectives differ between two of its members, or an empty string."""
    sequences: dict[str, dict[int, list[Collective]]] = {}
    for rank, log in logs.items():
        for issued in log:
            if issued.operation not in P2P:
                sequences.setdefault(issued.group, {}).setdefault(rank, []).append(issued)
    for group, by_rank in sequences.items():
        members = next(iter(by_rank.values()))[0].members
        longest = max(map(len, by_rank.values()))
        for number in range(longest):
            row = {rank: by_rank.get(rank, [])[number : number + 1] for rank in members}
            kinds = {(c[0].operation, c[0].values) if c else None for c in row.values()}
            if len(kinds) > 1:
                each = (f"worker {rank}: {c[0] if c else 'nothing'}" for rank, c in row.items())
                return f"collective {number} of group {group}: {'; '.join(each)}"
    return ""


def deadlock(logs: Logs) -> str:
    """Run the collectives on devices that take one after the other: what each worker waits for if
    they get stuck, or an empty string. Consecutive sends and receives of a group are one batch."""
    left = {rank: list(log) for rank, log in logs.items()}
    while any(left.values()):
        heads = {rank: _head(log) for rank, log in left.items()}
        ready = [
            (rank, issued)
            for rank, head in heads.items()
            for issued in head
            if all(_partner(issued, heads[member]) for member in issued.members)
        ]
        if not ready:
            stuck = (f"worker {rank} waits for {head[0]}" for rank, head in heads.items() if head)
            return "; ".join(stuck)
        _, chosen = ready[0]
        for member in chosen.members:
            partner = _partner(chosen, heads[member])
            assert partner is not None
            left[member].remove(partner)
    return ""


def _head(log: list[Collective]) -> list[Collective]:
    """What may start next: the first collective, or all of the first batch."""
    if not log or log[0].operation not in P2P:
        return log[:1]
    batch = []
    for issued in log:
        if issued.operation not in P2P or issued.group != log[0].group:
            break
        batch.append(issued)
    return batch


def _partner(issued: Collective, head: list[Collective]) -> Collective | None:
    """The same collective on another worker, or the other end of a send."""
    for other in head:
        same = (other.group, other.members) == (issued.group, issued.members)
        if same and (
            other.operation == issued.operation or {other.operation, issued.operation} == set(P2P)
        ):
            return other
    return None


@dataclass
class Schedule:
    """When the threads of a worker run: an adversary that chooses at each hand-over.

    Without one, the order in which threads run is left to chance, and a wrong order to luck.
    """

    at_once: float
    """How often a thread that was given work does it before the one that gave it goes on. Otherwise
    it waits until nothing else can happen."""
    collect_first: bool
    """Which of the two lanes goes first when both could."""
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = Random(self.seed)
        self._changed = threading.Condition()
        self._queues: list[_Queue] = []
        self._open = True

    def choose(self) -> bool:
        return self._random.random() < self.at_once

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Schedule the reducer's lanes and the writer of checkpoints."""
        count = exchange.Exchange._count_backward

        def count_backward(self_: Any, bucket: Any) -> None:
            self._set_open(bucket.is_last())  # then the backward pass waits
            count(self_, bucket)

        def make_queue() -> _Queue:
            self._queues.append(_Queue(self, len(self._queues)))
            return self._queues[-1]

        queues = SimpleNamespace(SimpleQueue=make_queue)
        threads = SimpleNamespace(Thread=lambda **given: _Writer(self, **given))
        with (
            patch.object(reducer, "queue", queues),
            patch.object(checkpointer, "threading", threads),
            patch.object(exchange.Exchange, "_count_backward", count_backward),
        ):
            yield

    def _set_open(self, value: bool) -> None:
        with self._changed:
            self._open = value
            self._changed.notify_all()

    def _may_run(self, number: int) -> bool:
        if not self._open:
            return False
        preferred = number % 2 == (0 if self.collect_first else 1)
        others = (queue for queue in self._queues if queue.number != number)
        return preferred or not any(queue.active for queue in others)


class _Queue:
    """A queue whose reader runs when the schedule says so."""

    def __init__(self, schedule: Schedule, number: int) -> None:
        self._schedule, self.number = schedule, number
        self._items: list[Any] = []
        self._busy = False

    @property
    def active(self) -> bool:
        return self._busy or bool(self._items)

    def put(self, item: Any) -> None:
        schedule, changed = self._schedule, self._schedule._changed
        with changed:
            self._items.append(item)
            if item is None:
                schedule._open = True
            changed.notify_all()
            if isinstance(threading.current_thread(), reducer._Lane) or item is None:
                return
            if schedule.choose():
                was_open, schedule._open = schedule._open, True
                changed.notify_all()
                changed.wait_for(lambda: not any(queue.active for queue in schedule._queues))
                schedule._open = was_open

    def get(self) -> Any:
        changed = self._schedule._changed
        with changed:
            self._busy = False
            changed.notify_all()
            changed.wait_for(lambda: self._items and self._schedule._may_run(self.number))
            item = self._items.pop(0)
            self._busy = item is not None  # the last one
            changed.notify_all()
            return item


class _Writer(threading.Thread):
    """A thread that does its work when it is started, or only when somebody waits for it."""

    def __init__(self, schedule: Schedule, **given: Any) -> None:
        super().__init__(**given)
        self._now = schedule.choose()

    def start(self) -> None:
        if self._now:
            super().start()
            super().join()

    def join(self, timeout: float | None = None) -> None:
        if not self._now:
            super().start()
        super().join(timeout)


SCHEDULES = (
    Schedule(at_once=0.0, collect_first=True),
    Schedule(at_once=1.0, collect_first=False),
    Schedule(at_once=0.5, collect_first=False, seed=1),
    Schedule(at_once=0.5, collect_first=True, seed=2),
)
"""One for each worker: the extremes, and two in between."""
