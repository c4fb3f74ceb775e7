"""The closed forms against scipy, and against what is published."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dat.evaluation.certification import largest_radius, lower_bound, radius, upper_bound
from dat.evaluation.certification.bounds import probability_for

ALPHAS = (0.5, 0.05, 0.001, 1e-6)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("n", [1, 2, 7, 100, 1_000, 100_000])
def test_lower_bound_is_scipys_exact_interval(n: int, alpha: float) -> None:
    for k in sorted({0, 1, n // 3, n // 2, n - 1, n}):
        test = stats.binomtest(k, n, alternative="greater")
        expected = test.proportion_ci(1 - alpha, method="exact").low
        assert float(lower_bound(k, n, alpha)) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(st.integers(1, 5000), st.floats(0, 1), st.sampled_from(ALPHAS))
def test_at_the_lower_bound_so_many_hits_have_chance_alpha(
    n: int, share: float, alpha: float
) -> None:
    """The definition: P[at least k hits] = alpha at p = the bound."""
    k = round(share * n)
    low = float(lower_bound(k, n, alpha))
    if k == 0:
        assert low == 0
    else:
        assert stats.binom.sf(k - 1, n, low) == pytest.approx(alpha, rel=1e-6)


@given(st.integers(1, 5000), st.floats(0, 1))
def test_the_upper_bound_mirrors_the_lower(n: int, share: float) -> None:
    k = round(share * n)
    high = float(upper_bound(k, n, 0.01))
    assert high == pytest.approx(1 - float(lower_bound(n - k, n, 0.01)))
    assert float(lower_bound(k, n, 0.01)) < high


def test_all_hits_have_a_simple_bound() -> None:
    n = np.array([1, 10, 1000, 100_000])
    assert lower_bound(n, n, 0.001) == pytest.approx(0.001 ** (1 / n), rel=1e-9)


@pytest.mark.parametrize("sigma", [0.12, 0.25, 1.0])
def test_radius_and_probability_are_inverse(sigma: float) -> None:
    p = np.array([0.5000001, 0.6, 0.9, 0.999, 0.9999999])
    assert radius(p, sigma) == pytest.approx(sigma * stats.norm.ppf(p))
    assert probability_for(radius(p, sigma), sigma) == pytest.approx(p)


def test_half_or_less_gives_no_radius() -> None:
    assert radius([0.0, 0.3, 0.5], 0.25).tolist() == [0, 0, 0]


@pytest.mark.parametrize("n", [10, 100, 1000])
def test_abstention_begins_where_the_exact_test_cannot_tell_from_a_coin(n: int) -> None:
    for k in range(n + 1):
        certified = float(radius(lower_bound(k, n, 0.001), 0.25)) > 0
        test = stats.binomtest(k, n, 0.5, alternative="greater")
        assert certified == (test.pvalue < 0.001)


def test_what_no_number_of_hits_can_show() -> None:
    """sigma = 0.12 can never certify r = 0.5 with n = 100,000 and alpha = 0.001 (the zeros in the
    paper's Table 2), and sigma = 0.25 can."""
    most = largest_radius(0.12, 100_000, 0.001)
    assert most == pytest.approx(0.12 * stats.norm.ppf(0.001 ** (1 / 100_000)))
    assert 0.4 < most < 0.5
    assert largest_radius(0.25, 100_000, 0.001) > 0.5
    assert float(radius(lower_bound(100_000, 100_000, 0.001), 0.12)) == pytest.approx(most)
    needed = math.log(0.001) / math.log(float(probability_for(0.5, 0.12)))
    assert needed > 400_000
