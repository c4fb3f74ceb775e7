"""The simulation shares resources fairly: closed forms, and no resource is exceeded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dat.tools.planning.pipeline import Activity, run, share, water_fill

NUMBERS = st.floats(0.01, 100)


def test_alone_an_activity_takes_its_least_time_or_what_its_resource_allows() -> None:
    assert run([[Activity(2.0)]], {}) == 2.0
    assert run([[Activity(2.0, {"link": 10.0})]], {"link": 10.0}) == pytest.approx(2.0)
    assert run([[Activity(2.0, {"link": 60.0})]], {"link": 10.0}) == pytest.approx(6.0)


def test_two_that_want_all_of_a_resource_get_half_and_the_longer_then_all() -> None:
    short, long = Activity(1.0, {"cores": 1.0}), Activity(3.0, {"cores": 3.0})
    assert run([[short], [long]], {"cores": 1.0}) == pytest.approx(4.0)
    assert short.ended == pytest.approx(2.0)


def test_who_wants_little_gets_all_of_it() -> None:
    little, much = Activity(10.0, {"cores": 1.0}), Activity(1.0, {"cores": 1.0})
    assert share([little, much], {"cores": 1.0}) == pytest.approx([0.1, 0.9])


def test_chains_follow_each_other_and_wait() -> None:
    first = Activity(1.0)
    second = Activity(1.0, after=(first,))
    last = Activity(0.5)
    nothing = Activity(0.0)
    assert run([[first, nothing, Activity(2.0)], [second, last]], {}) == 3.0
    assert (second.started, last.ended) == (1.0, 2.5)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=6), NUMBERS)
def test_what_is_short_is_shared_out_fairly(
    wants: list[tuple[float, float]], capacity: float
) -> None:
    wanted, threads = [it[0] for it in wants], [it[1] for it in wants]
    given_ = water_fill(wanted, threads, capacity)
    assert all(got <= want + 1e-9 for got, want in zip(given_, wanted, strict=True))
    assert sum(given_) == pytest.approx(min(sum(wanted), capacity))
    each = [got / of for got, of in zip(given_, threads, strict=True)]
    short = [it for it, want, got in zip(each, wanted, given_, strict=True) if got < want - 1e-6]
    assert all(it >= max(each) - 1e-6 * max(each) - 1e-9 for it in short)


@given(
    st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=5),
    st.tuples(NUMBERS, NUMBERS),
)
def test_no_resource_is_given_twice(
    wants: list[tuple[float, float, float]], capacities: tuple[float, float]
) -> None:
    active = [Activity(least, {"a": a, "b": b}) for least, a, b in wants]
    speeds = share(active, {"a": capacities[0], "b": capacities[1]})
    for resource, capacity in zip("ab", capacities, strict=True):
        used = sum(it.demands[resource] * at for it, at in zip(active, speeds, strict=True))
        assert used <= capacity * (1 + 1e-6)
    assert all(at > 0 for at in speeds)
