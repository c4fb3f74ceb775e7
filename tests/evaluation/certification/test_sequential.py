"""Claims that may be made at any moment, put to the test with coins of known probability."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dat.evaluation.certification import lower_bound
from dat.evaluation.certification.bounds import Floats, probability_for
from dat.evaluation.certification.sequential import Flags, RadiusTests, SequentialTest

RADII = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4)


def tosses(p: float, trials: int, n: int, seed: int = 0) -> Floats:
    """Running counts of hits, one row a trial."""
    random = np.random.default_rng(seed)
    return np.cumsum(random.random((trials, n)) < p, axis=1, dtype=np.float64)


def ever(test: SequentialTest, hits: Floats) -> Flags:
    """Who claims at any moment, looking after every toss."""
    claimed = np.zeros(len(hits), dtype=bool)
    for n in range(1, hits.shape[1] + 1):
        claimed |= test.accepts(hits[:, n - 1], np.full(len(hits), float(n)))
    return claimed


def at_most(errors: int, trials: int, alpha: float) -> bool:
    """Whether so many errors are no evidence against a rate of alpha."""
    return bool(stats.binom.sf(errors - 1, trials, alpha) > 1e-4)


@pytest.mark.parametrize("alpha", [0.05, 0.01])
@pytest.mark.parametrize("p", [0.6, 0.9, 0.99])
def test_a_false_claim_is_as_rare_as_promised_however_often_one_looks(
    p: float, alpha: float
) -> None:
    """The hardest case, a truth right at the threshold, with a look after every toss."""
    trials = 4000
    claimed = ever(SequentialTest(p, alpha, 600), tosses(p, trials, 600))
    assert at_most(int(claimed.sum()), trials, alpha)


@pytest.mark.parametrize("p", [0.6, 0.9])
def test_the_fixed_bound_is_wrong_as_rarely_as_promised(p: float) -> None:
    random, trials, n = np.random.default_rng(1), 40_000, 1000
    wrong = lower_bound(random.binomial(n, p, trials), n, 0.01) > p
    assert at_most(int(wrong.sum()), trials, 0.01)
    assert wrong.mean() > 0.002  # and no looser than it has to be


def test_a_fixed_bound_that_is_peeked_at_would_be_wrong_far_too_often() -> None:
    """Why all this is needed."""
    hits = tosses(0.9, 2000, 600)
    n = np.arange(1, 601)
    peeked = (lower_bound(hits, n, 0.01) > 0.9).any(axis=1)
    assert not at_most(int(peeked.sum()), 2000, 0.01)


@settings(max_examples=50)
@given(
    st.floats(0.5, 0.9999),
    st.sampled_from((0.1, 0.001)),
    st.sampled_from((100, 10_000)),
    st.integers(0, 400),
    st.floats(0, 1),
)
def test_the_game_is_fair_at_the_threshold(
    threshold: float, alpha: float, budget: int, n: int, share: float
) -> None:
    """One more toss changes the capital by nothing on average: a martingale, so Ville's inequality
    holds; and it starts at 1."""
    test = SequentialTest(threshold, alpha, budget)
    k = round(share * n)

    def capital(hits: int, samples: int) -> float:
        log_capital = test.capital(np.array([float(hits)]), np.array([float(samples)]))
        return math.exp(float(log_capital[0]))

    assert capital(0, 0) == pytest.approx(1)
    after = threshold * capital(k + 1, n + 1) + (1 - threshold) * capital(k, n + 1)
    assert after == pytest.approx(capital(k, n), rel=1e-6)


@pytest.mark.parametrize("r", RADII)
def test_images_that_never_miss_are_claimed_with_few_more_samples_than_any_test_needs(
    r: float,
) -> None:
    threshold = float(probability_for(r, 0.12))
    test = SequentialTest(threshold, 0.001, 100_000)
    fewest = math.ceil(math.log(0.001) / math.log(threshold))
    enough = next(
        n for n in range(fewest, 2 * fewest + 2) if test.accepts(*np.full((2, 1), float(n)))[0]
    )
    assert enough <= 1.12 * fewest + 1


@pytest.mark.parametrize("p", [0.5, 0.95, 0.99])
def test_whoever_is_far_below_the_threshold_is_given_up_soon(p: float) -> None:
    test = SequentialTest(0.5 + p / 2, 0.001, 100_000)
    hits = tosses(p, 200, 8000)
    given_up = test.hopeless(hits[:, -1], np.full(200, 8000.0))
    assert given_up.mean() > 0.95


def test_what_the_budget_cannot_show_is_given_up_at_once() -> None:
    test = SequentialTest(float(probability_for(0.5, 0.12)), 0.001, 100_000)
    assert test.hopeless(np.array([32.0]), np.array([32.0])).all()


def test_a_sure_image_is_not_given_up() -> None:
    for r in RADII:
        test = SequentialTest(float(probability_for(r, 0.12)), 0.001, 100_000)
        n = np.array([32.0, 1000.0, 30_000.0])
        assert not test.hopeless(n, n).any()


def test_a_radius_is_claimed_only_with_all_smaller_ones() -> None:
    tests = RadiusTests((0.3, 0.1, 0.1), sigma=0.12, alpha=0.001, budget=10_000)
    assert tests.radii == (0.1, 0.3)
    nothing = np.zeros((1, 2), dtype=bool)
    few_hits, many_hits = np.array([100.0]), np.array([3000.0])
    claimed, still = tests.update(nothing, few_hits, few_hits)
    assert claimed.tolist() == [[True, False]] and still.tolist() == [[False, True]]
    claimed, still = tests.update(claimed, many_hits, many_hits)
    assert claimed.all() and not still.any()
    claimed, _ = tests.update(np.array([[False, True]]), np.array([0.0]), few_hits)
    assert not claimed.any()


def test_what_was_claimed_stays_claimed() -> None:
    """Later samples may look worse; the claim was right when it was made."""
    tests = RadiusTests((0.1,), sigma=0.12, alpha=0.001, budget=10_000)
    claimed, _ = tests.update(np.ones((1, 1), dtype=bool), np.array([10.0]), np.array([100.0]))
    assert claimed.all()


def test_no_radius_of_a_ladder_is_claimed_falsely_more_often_than_alpha() -> None:
    """All radii at the full alpha: a truth between two of them, looks at every 8th toss."""
    trials, alpha = 3000, 0.02
    tests = RadiusTests((0.05, 0.1, 0.12, 0.2), sigma=0.12, alpha=alpha, budget=800)
    hits = tosses(float(probability_for(0.0999, 0.12)), trials, 800)
    claimed = np.zeros((trials, 4), dtype=bool)
    for n in range(8, 801, 8):
        claimed, _ = tests.update(claimed, hits[:, n - 1], np.full(trials, float(n)))
    assert claimed[:, 0].mean() > 0.9
    assert at_most(int(claimed[:, 1:].any(axis=1).sum()), trials, alpha)
