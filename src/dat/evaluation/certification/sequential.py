"""Sequential tests of whether a probability is above a threshold, by betting.

A gambler starts with capital 1 and bets, at odds that are fair if the true probability is p0, that
it is some q > p0. After k hits in n samples the capital is

    (q / p0)^k * ((1 - q) / (1 - p0))^(n - k).

If the true probability is at most p0, the capital *ever* reaches 1 / alpha with probability at most
alpha (Ville's inequality). So it may be checked after every sample, and the test accepts the first
time it gets there: the claim is valid at any stopping time, unlike a confidence interval that is
checked repeatedly. As the best q is unknown, the capital is spread over several, each optimal for
another number of samples, and half of it is bet on q = 1, as most images never miss. Stopping
without a claim needs no such care, as "not certified" claims nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import logsumexp, rel_entr

from dat.evaluation.certification.bounds import Floats, probability_for, upper_bound

SPACING = 4.0
"""Ratio between the numbers of samples that successive bets are optimal for."""
CERTAIN_SHARE = 0.5
"""Share of the capital that is bet on q = 1."""
HOPELESS = 0.01
"""Probability that one check gives up on an image that the whole budget would have certified."""
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class SequentialTest:
    """Tests whether a probability is above `threshold`. It accepts wrongly with probability at most
    `alpha`, however often it is checked, and gives up after `budget` samples or once acceptance is
    hopeless."""

    threshold: float
    alpha: float
    budget: int

    def capital(self, hits: Floats, samples: Floats) -> Floats:
        """Log of the gambler's capital."""
        q, weights = self._bets
        misses = (samples - hits)[:, None]
        with np.errstate(divide="ignore"):
            per_miss = np.log1p(-q) - math.log1p(-self.threshold)  # -inf where q = 1
        gains = hits[:, None] * np.log(q / self.threshold)
        gains = gains + np.multiply(misses, per_miss, where=misses > 0, out=np.zeros_like(gains))
        return np.asarray(logsumexp(gains, axis=1, b=weights))

    def accepts(self, hits: Floats, samples: Floats) -> Flags:
        """Whether the probability is claimed to be above the threshold."""
        if self.threshold >= 1:  # the probability of a very large radius rounds to 1
            return np.zeros(len(hits), dtype=bool)
        return self.capital(hits, samples) >= -math.log(self.alpha)

    def hopeless(self, hits: Floats, samples: Floats) -> Flags:
        """Whether even the best plausible outcome would not be accepted within the budget."""
        if self._share_needed is None:
            return np.ones(len(hits), dtype=bool)
        return upper_bound(hits, samples, HOPELESS) < self._share_needed

    @cached_property
    def _bets(self) -> tuple[Floats, Floats]:
        """The values of q, and the share of the capital bet on each."""
        target, p0 = -math.log(self.alpha), self.threshold
        fewest = target / -math.log(p0)  # if every sample is a hit
        counts = []
        count = float(self.budget)
        while count > SPACING / 2 * fewest:
            counts.append(count)
            count /= SPACING
        # after n samples the bet on q has gained 1 / alpha if KL(q, p0) = log(1 / alpha) / n
        optimal = [
            brentq(lambda q, n=n: float(_divergence(q, p0)) - target / n, p0, 1.0) for n in counts
        ]
        share = CERTAIN_SHARE if optimal else 1.0
        weights = [(1 - share) / max(len(optimal), 1)] * len(optimal)
        return np.array([*optimal, 1.0]), np.array([*weights, share])

    @cached_property
    def _share_needed(self) -> float | None:
        """The smallest share of hits that is accepted after the whole budget; None if none is."""
        low, high = math.floor(self.threshold * self.budget), self.budget

        def enough(hits: int) -> bool:
            return bool(self.accepts(np.array([float(hits)]), np.array([float(self.budget)]))[0])

        if not enough(high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return high / self.budget


def _divergence(q: float, p: float) -> float:
    """Kullback-Leibler divergence between two Bernoulli distributions."""
    return float(rel_entr(q, p) + rel_entr(1 - q, 1 - p))


class RadiusTests:
    """Tests whether the certified radius is at least r, for several r at once.

    One test per radius, each at the full alpha: they are evaluated in order, and a radius is
    claimed only if all smaller ones are. So any false claim implies a false claim of the smallest
    radius that does not hold, which has probability at most alpha.
    """

    def __init__(
        self, radii: tuple[float, ...], *, sigma: float, alpha: float, budget: int
    ) -> None:
        self.radii = tuple(sorted(set(radii)))
        thresholds = probability_for(self.radii, sigma).tolist()
        self.tests = [SequentialTest(p, alpha, budget) for p in thresholds]

    def update(self, claimed: Flags, hits: Floats, samples: Floats) -> tuple[Flags, Flags]:
        """Which radii are claimed now, given those claimed before, and which are still undecided;
        one row per image, one column per radius."""
        accepted = np.stack([test.accepts(hits, samples) for test in self.tests], axis=1)
        hopeless = np.stack([test.hopeless(hits, samples) for test in self.tests], axis=1)
        claimed = np.logical_and.accumulate(claimed | accepted, axis=1)
        lost = np.logical_or.accumulate(hopeless & ~claimed, axis=1)
        return claimed, ~claimed & ~lost
