"""The closed forms of randomized smoothing (Cohen et al. 2019).

If a network answers c on a Gaussian cloud around x with probability at least p, then the smoothed
classifier answers c within R = sigma * Phi^-1(p) of x, in the l2 norm.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Floats = NDArray[np.float64]


def lower_bound(hits: ArrayLike, samples: ArrayLike, alpha: float) -> Floats:
    """Below the true probability with a chance of at least 1 - alpha (Clopper & Pearson 1934)."""
    k, n = np.asarray(hits, dtype=float), np.asarray(samples, dtype=float)
    return np.where(k > 0, stats.beta.ppf(alpha, np.maximum(k, 1), n - k + 1), 0.0)


def upper_bound(hits: ArrayLike, samples: ArrayLike, alpha: float) -> Floats:
    """Above the true probability with a chance of at least 1 - alpha."""
    k, n = np.asarray(hits, dtype=float), np.asarray(samples, dtype=float)
    return 1.0 - lower_bound(n - k, n, alpha)


def radius(probability: ArrayLike, sigma: float) -> Floats:
    """R; 0 where the class is not known to be the likeliest."""
    p = np.asarray(probability, dtype=float)
    return np.where(p > 0.5, sigma * stats.norm.ppf(np.maximum(p, 0.5)), 0.0)


def probability_for(wanted: ArrayLike, sigma: float) -> Floats:
    """The p that a radius takes."""
    return np.asarray(stats.norm.cdf(np.asarray(wanted, dtype=float) / sigma))


def largest_radius(sigma: float, samples: int, alpha: float) -> float:
    """What so many samples can show at best, when all of them agree."""
    return float(radius(alpha ** (1.0 / samples), sigma))
