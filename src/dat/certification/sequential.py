"""Is the probability above a threshold? Asked of a coin that may be watched while it is tossed.

A gambler starts with capital 1 and bets, at odds that are fair if the true probability is p0, that
it is some q > p0. After k hits in n tosses the capital is

    (q / p0)^k * ((1 - q) / (1 - p0))^(n - k).

If the truth is p0 or less, the chance that the capital *ever* reaches 1 / alpha is at most alpha
(Ville's inequality). So it may be looked at after every toss, and the question is answered yes at
the first moment it gets there: a claim that holds at any stopping time, unlike a confidence
interval looked at repeatedly. Since nobody knows the right q beforehand, the capital is spread over
several, each made for another number of tosses, and half of it is bet on q = 1: most images never
miss. Stopping without a claim needs no such care, as "not certified" claims nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import logsumexp, rel_entr

from dat.certification.bounds import Floats, probability_for, upper_bound

SPACING = 4.0
"""Bets are made for numbers of samples so many times apart."""
SURE = 0.5
"""The share of the capital that is bet on q = 1."""
HOPELESS = 0.01
"""Chance of giving up, at one look, on an image that the whole budget would have certified."""
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Question:
    """Is the probability above `threshold`? Answered yes wrongly with a chance of at most `alpha`,
    however often it is asked, and given up after `budget` samples or once there is no hope."""

    threshold: float
    alpha: float
    budget: int

    def capital(self, hits: Floats, samples: Floats) -> Floats:
        """log of the gambler's capital."""
        q, weights = self._bets
        misses = (samples - hits)[:, None]
        with np.errstate(divide="ignore"):
            lost = np.log1p(-q) - math.log1p(-self.threshold)  # -inf where q = 1
        bet = hits[:, None] * np.log(q / self.threshold)
        bet = bet + np.multiply(misses, lost, where=misses > 0, out=np.zeros_like(bet))
        return np.asarray(logsumexp(bet, axis=1, b=weights))

    def claims(self, hits: Floats, samples: Floats) -> Flags:
        """Yes, above the threshold."""
        if self.threshold >= 1:  # a radius so large that no float tells its probability from 1
            return np.zeros(len(hits), dtype=bool)
        return self.capital(hits, samples) >= -math.log(self.alpha)

    def hopeless(self, hits: Floats, samples: Floats) -> Flags:
        """Even the best that is still plausible would not make the claim within the budget."""
        if self._share_needed is None:
            return np.ones(len(hits), dtype=bool)
        return upper_bound(hits, samples, HOPELESS) < self._share_needed

    @cached_property
    def _bets(self) -> tuple[Floats, Floats]:
        """The values of q, and how the capital is spread over them."""
        target, p0 = -math.log(self.alpha), self.threshold
        fewest = target / -math.log(p0)  # if nothing but hits come
        counts = []
        count = float(self.budget)
        while count > SPACING / 2 * fewest:
            counts.append(count)
            count /= SPACING
        # after n samples the bet on q has won 1 / alpha if KL(q, p0) = log(1 / alpha) / n
        made_for = [
            brentq(lambda q, n=n: float(_divergence(q, p0)) - target / n, p0, 1.0) for n in counts
        ]
        share = SURE if made_for else 1.0
        weights = [(1 - share) / max(len(made_for), 1)] * len(made_for)
        return np.array([*made_for, 1.0]), np.array([*weights, share])

    @cached_property
    def _share_needed(self) -> float | None:
        """The share of hits that makes the claim at the budget's end; none if nothing does."""
        low, high = math.floor(self.threshold * self.budget), self.budget

        def enough(hits: int) -> bool:
            return bool(self.claims(np.array([float(hits)]), np.array([float(self.budget)]))[0])

        if not enough(high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return high / self.budget


def _divergence(q: float, p: float) -> float:
    """Kullback-Leibler, between two coins."""
    return float(rel_entr(q, p) + rel_entr(1 - q, 1 - p))


class Ladder:
    """Is the radius at least r, for several r at once?

    One question a radius, each at the full alpha: they are asked in order, and a radius is claimed
    only if all smaller ones are. Then a false claim of any radius takes a false claim of the
    smallest one that is not true, which has a chance of at most alpha.
    """

    def __init__(
        self, radii: tuple[float, ...], *, sigma: float, alpha: float, budget: int
    ) -> None:
        self.radii = tuple(sorted(set(radii)))
        thresholds = probability_for(self.radii, sigma).tolist()
        self.questions = [Question(p, alpha, budget) for p in thresholds]

    def climb(self, state: Flags, hits: Floats, samples: Floats) -> tuple[Flags, Flags]:
        """Which radii are claimed now, given those that were before, and which are still open;
        one row an image, one column a radius."""
        asked = [(q.claims(hits, samples), q.hopeless(hits, samples)) for q in self.questions]
        won = state | np.stack([claimed for claimed, _ in asked], axis=1)
        claimed = np.logical_and.accumulate(won, axis=1)
        lost = np.logical_or.accumulate(
            np.stack([hopeless for _, hopeless in asked], axis=1) & ~claimed, axis=1
        )
        return claimed, ~claimed & ~lost
