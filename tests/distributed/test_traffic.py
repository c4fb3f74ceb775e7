"""The ledger: bytes and seconds add up, from any thread."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dat.distributed.traffic import Ledger, Traffic, union_length

CPU = torch.device("cpu")
NOTHING = Traffic(0, 0.0, 0.0)


class ManualClock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    manual = ManualClock()
    monkeypatch.setattr("dat.distributed.traffic.time", manual)
    return manual


@pytest.fixture
def busy_threads() -> Iterator[None]:
    """Switch between threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0),
        ([(1, 4)], 3),
        ([(2, 2)], 0),
        ([(1, 2), (3, 5)], 3),  # apart
        ([(1, 3), (3, 5)], 4),  # one after the other
        ([(1, 4), (2, 6)], 5),  # overlapping
        ([(1, 9), (2, 3), (4, 5)], 8),  # one inside the other
        ([(4, 6), (1, 5), (1, 2)], 5),  # in any order
        ([(1, 3), (1, 3)], 2),  # twice the same
        ([(-3, -1), (-2, 1)], 4),
    ],
)
def test_union_length_is_the_length_of_the_union(
    intervals: list[tuple[float, float]], length: float
) -> None:
    assert union_length(intervals) == length


ends = st.tuples(st.integers(-20, 20), st.integers(0, 15)).map(lambda pair: (pair[0], sum(pair)))


@settings(max_examples=100)
@given(st.lists(ends, max_size=8))
def test_union_length_counts_every_moment_once(intervals: list[tuple[int, int]]) -> None:
    moments = {moment for start, end in intervals for moment in range(start, end)}
    assert union_length([(float(start), float(end)) for start, end in intervals]) == len(moments)


def test_union_length_does_not_modify_its_argument() -> None:
    intervals = [(3.0, 4.0), (1.0, 2.0)]
    union_length(intervals)
    assert intervals == [(3.0, 4.0), (1.0, 2.0)]


def test_a_new_ledger_is_empty() -> None:
    assert Ledger(CPU).read_and_reset() == NOTHING


def test_bytes_add_up_and_overlapping_seconds_count_once(clock: ManualClock) -> None:
    ledger = Ledger(CPU)
    clock.now = 1.0
    first = ledger.start_transfer()
    clock.now = 2.0
    second = ledger.start_transfer()
    clock.now = 4.0
    first(100)
    clock.now = 5.0
    second(20)
    clock.now = 10.0
    third = ledger.start_transfer()
    clock.now = 10.5
    third(3)
    assert ledger.read_and_reset() == Traffic(sent=123, busy=4.5, exposed=0.0)


def test_exposed_seconds_are_counted_separately() -> None:
    ledger = Ledger(CPU)
    ledger.add_exposed(0.5)
    ledger.add_exposed(0.25)
    assert ledger.read_and_reset() == Traffic(sent=0, busy=0.0, exposed=0.75)


def test_reading_resets_the_ledger(clock: ManualClock) -> None:
    ledger = Ledger(CPU)
    finish = ledger.start_transfer()
    clock.now = 2.0
    finish(7)
    ledger.add_exposed(1.0)
    assert ledger.read_and_reset() == Traffic(7, 2.0, 1.0)
    assert ledger.read_and_reset() == NOTHING


def test_a_transfer_counts_in_the_reading_in_which_it_finishes(clock: ManualClock) -> None:
    ledger = Ledger(CPU)
    finish = ledger.start_transfer()
    clock.now = 1.0
    assert ledger.read_and_reset() == NOTHING
    clock.now = 3.0
    finish(9)
    assert ledger.read_and_reset() == Traffic(9, 3.0, 0.0)


def test_unfinished_transfers_are_not_counted(clock: ManualClock) -> None:
    ledger = Ledger(CPU)
    ledger.start_transfer()
    clock.now = 5.0
    assert ledger.read_and_reset() == NOTHING


def run_in_threads(work: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.usefixtures("busy_threads")
def test_no_byte_is_lost_with_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    ticking = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr("dat.distributed.traffic.time", ticking)
    ledger = Ledger(CPU)
    finish = ledger.start_transfer()  # from the first tick to the last: contains all others

    def transfer(thread: int) -> None:
        for index in range(500):
            ledger.start_transfer()(1000 * thread + index)

    run_in_threads(transfer, 6)
    finish(0)
    total = sum(1000 * thread + index for thread in range(6) for index in range(500))
    assert ledger.read_and_reset() == Traffic(total, 6 * 500 * 2 + 1.0, 0.0)


@pytest.mark.usefixtures("busy_threads")
def test_concurrent_readings_count_every_byte_once() -> None:
    ledger = Ledger(CPU)
    readings: list[int] = []

    def transfer_or_read(thread: int) -> None:
        for _ in range(300):
            if thread == 0:
                readings.append(ledger.read_and_reset().sent)
            else:
                ledger.start_transfer()(thread)

    run_in_threads(transfer_or_read, 5)
    assert sum(readings) + ledger.read_and_reset().sent == 300 * (1 + 2 + 3 + 4)


def test_a_transfer_that_finishes_during_a_reading_counts_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger = Ledger(CPU)
    finish = ledger.start_transfer()
    finishing = threading.Thread(target=finish, args=(5,))

    def slow_union_length(intervals: list[tuple[float, float]]) -> float:
        finishing.start()
        finishing.join(0.05)  # would have finished by now without the lock
        return union_length(intervals)

    with monkeypatch.context() as patch:
        patch.setattr("dat.distributed.traffic.union_length", slow_union_length)
        assert ledger.read_and_reset().sent == 0
    finishing.join()
    assert ledger.read_and_reset().sent == 5


def test_a_transfer_may_finish_in_another_thread(clock: ManualClock) -> None:
    ledger = Ledger(CPU)
    finish = ledger.start_transfer()
    clock.now = 1.5
    run_in_threads(lambda _: finish(11), 1)
    assert ledger.read_and_reset() == Traffic(11, 1.5, 0.0)
