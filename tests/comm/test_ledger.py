"""The ledger: bytes and seconds add up, whichever thread they come from."""

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

from dat.comm.ledger import Ledger, Traffic, covered

CPU = torch.device("cpu")
NOTHING = Traffic(0, 0.0, 0.0)


class Hands:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    made = Hands()
    monkeypatch.setattr("dat.comm.ledger.time", made)
    return made


@pytest.fixture
def busy_threads() -> Iterator[None]:
    """Threads take turns as often as they can."""
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
def test_covered_is_the_length_of_the_union(
    intervals: list[tuple[float, float]], length: float
) -> None:
    assert covered(intervals) == length


ends = st.tuples(st.integers(-20, 20), st.integers(0, 15)).map(lambda two: (two[0], sum(two)))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(ends, max_size=8))
def test_covered_counts_every_moment_once(intervals: list[tuple[int, int]]) -> None:
    moments = {moment for start, end in intervals for moment in range(start, end)}
    assert covered([(float(start), float(end)) for start, end in intervals]) == len(moments)


def test_covered_leaves_its_argument_alone() -> None:
    intervals = [(3.0, 4.0), (1.0, 2.0)]
    covered(intervals)
    assert intervals == [(3.0, 4.0), (1.0, 2.0)]


def test_a_new_ledger_is_empty() -> None:
    assert Ledger(CPU).close() == NOTHING


def test_flights_add_up_their_bytes_and_share_their_seconds(hands: Hands) -> None:
    ledger = Ledger(CPU)
    hands.now = 1.0
    first = ledger.open_flight()
    hands.now = 2.0
    second = ledger.open_flight()
    hands.now = 4.0
    first(100)
    hands.now = 5.0
    second(20)
    hands.now = 10.0
    third = ledger.open_flight()
    hands.now = 10.5
    third(3)
    assert ledger.close() == Traffic(sent=123, busy=4.5, exposed=0.0)


def test_exposed_seconds_add_up_apart_from_the_busy_ones() -> None:
    ledger = Ledger(CPU)
    ledger.expose(0.5)
    ledger.expose(0.25)
    assert ledger.close() == Traffic(sent=0, busy=0.0, exposed=0.75)


def test_close_starts_anew(hands: Hands) -> None:
    ledger = Ledger(CPU)
    land = ledger.open_flight()
    hands.now = 2.0
    land(7)
    ledger.expose(1.0)
    assert ledger.close() == Traffic(7, 2.0, 1.0)
    assert ledger.close() == NOTHING


def test_a_flight_belongs_to_the_reading_in_which_it_lands(hands: Hands) -> None:
    ledger = Ledger(CPU)
    land = ledger.open_flight()
    hands.now = 1.0
    assert ledger.close() == NOTHING
    hands.now = 3.0
    land(9)
    assert ledger.close() == Traffic(9, 3.0, 0.0)


def test_flights_that_never_land_count_for_nothing(hands: Hands) -> None:
    ledger = Ledger(CPU)
    ledger.open_flight()
    hands.now = 5.0
    assert ledger.close() == NOTHING


def run_in_threads(work: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.usefixtures("busy_threads")
def test_no_byte_is_lost_when_many_threads_land(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr("dat.comm.ledger.time", clock)
    ledger = Ledger(CPU)
    begin = ledger.open_flight()  # from the first tick to the last: all others lie within

    def fly(number: int) -> None:
        for flight in range(500):
            ledger.open_flight()(1000 * number + flight)

    run_in_threads(fly, 6)
    begin(0)
    total = sum(1000 * number + flight for number in range(6) for flight in range(500))
    assert ledger.close() == Traffic(total, 6 * 500 * 2 + 1.0, 0.0)


@pytest.mark.usefixtures("busy_threads")
def test_no_byte_is_lost_or_counted_twice_while_the_ledger_is_read() -> None:
    ledger = Ledger(CPU)
    read: list[int] = []

    def fly(number: int) -> None:
        for _ in range(300):
            if number == 0:
                read.append(ledger.close().sent)
            else:
                ledger.open_flight()(number)

    run_in_threads(fly, 5)
    assert sum(read) + ledger.close().sent == 300 * (1 + 2 + 3 + 4)


def test_what_lands_during_a_reading_is_left_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger = Ledger(CPU)
    land = ledger.open_flight()
    landing = threading.Thread(target=land, args=(5,))

    def slowly(intervals: list[tuple[float, float]]) -> float:
        landing.start()
        landing.join(0.05)  # it would be over by now, if it did not have to wait
        return covered(intervals)

    with monkeypatch.context() as patch:
        patch.setattr("dat.comm.ledger.covered", slowly)
        assert ledger.close().sent == 0
    landing.join()
    assert ledger.close().sent == 5


def test_a_flight_may_land_in_another_thread(hands: Hands) -> None:
    ledger = Ledger(CPU)
    land = ledger.open_flight()
    hands.now = 1.5
    run_in_threads(lambda _: land(11), 1)
    assert ledger.close() == Traffic(11, 1.5, 0.0)
