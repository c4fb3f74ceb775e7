"""The closed forms of randomized smoothing (Cohen et al. 2019).

If a network predicts c under Gaussian noise around x with probability at least p, the smoothed
classifier predicts c everywhere within R = sigma * Phi^-1(p) of x, in the l2 norm.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Floats = NDArray[np.float64]


def lower_bound(hits: ArrayLike, samples: ArrayLike, alpha: float) -> Floats:
    """Lower bound on the probability, with confidence 1 - alpha (Clopper & Pearson 1934)."""
    k, n = np.asarray(hits, dtype=float), np.asarray(samples, dtype=float)
    return np.where(k > 0, stats.beta.ppf(alpha, np.maximum(k, 1), n - k + 1), 0.0)


def upper_bound(hits: ArrayLike, samples: ArrayLike, alpha: float) -> Floats:
    """Upper bound on the probability, with confidence 1 - alpha."""
    k, n = np.asarray(hits, dtype=float), np.asarray(samples, dtype=float)
    return 1.0 - lower_bound(n - k, n, alpha)


def radius(probability: ArrayLike, sigma: float) -> Floats:
    """The certified radius R; 0 where the class is not certain to be the most likely one."""
    p = np.asarray(probability, dtype=float)
    return np.where(p > 0.5, sigma * stats.norm.ppf(np.maximum(p, 0.5)), 0.0)


def probability_for(radii: ArrayLike, sigma: float) -> Floats:
    """The probability p that certifies a radius."""
    return np.asarray(stats.norm.cdf(np.asarray(radii, dtype=float) / sigma))


def largest_radius(sigma: float, samples: int, alpha: float) -> float:
    """The largest radius that `samples` samples can certify, when all of them agree."""
    return float(radius(alpha ** (1.0 / samples), sigma))
