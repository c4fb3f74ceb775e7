"""How many samples an image gets: CERTIFY as published, and one that stops when it knows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dat.certification.bounds import lower_bound, radius
from dat.certification.certificates import Certificate
from dat.certification.sampler import ABSTAIN, BLOCK, Asked, Sampler
from dat.certification.sequential import Ladder

GROWTH = 1.15
"""From one look at an image to the next, its samples grow by this factor."""
TOGETHER = 64
"""Images that are sampled side by side, so that the last samples of each still fill a batch."""


@dataclass(frozen=True)
class Fixed:
    """CERTIFY as published."""

    n0: int
    n: int
    alpha: float
    radii: tuple[float, ...] = ()

    def work(self, sampler: Sampler, rows: Sequence[int]) -> Iterator[list[Certificate]]:
        for row in rows:
            start = time.perf_counter()
            guess = int(sampler.count("select", [Asked(row, 0, self.n0)])[0].argmax())
            hits = int(sampler.count("estimate", [Asked(row, 0, self.n)])[0, guess])
            reach = float(radius(lower_bound(hits, self.n, self.alpha), sampler.sigma))
            predicted = guess if reach > 0 else ABSTAIN
            seconds = time.perf_counter() - start
            yield [Certificate(row, predicted, reach, self.n0 + self.n, seconds)]


@dataclass(frozen=True)
class Adaptive:
    """Only whether the label's radius reaches each of `radii`."""

    radii: tuple[float, ...]
    n: int
    alpha: float

    def work(self, sampler: Sampler, rows: Sequence[int]) -> Iterator[list[Certificate]]:
        ladder = Ladder(self.radii, sigma=sampler.sigma, alpha=self.alpha, budget=self.n)
        for first in range(0, len(rows), TOGETHER):
            yield from self._settle(sampler, ladder, np.array(rows[first : first + TOGETHER]))

    def _settle(
        self, sampler: Sampler, ladder: Ladder, rows: np.ndarray[Any, Any]
    ) -> Iterator[list[Certificate]]:
        """Sample some images side by side; each leaves when all radii are settled."""
        labels = sampler.data.labels[torch.from_numpy(rows)].numpy()
        shape = (len(rows), len(self.radii))
        hits, seconds = np.zeros(len(rows)), np.zeros(len(rows))
        claimed = np.zeros(shape, dtype=bool)
        settled = np.zeros(shape, dtype=np.int64)
        left, drawn = np.arange(len(rows)), 0
        while len(left):
            start = time.perf_counter()
            upto = min(self.n, -(-int(max(drawn * GROWTH, drawn + 1)) // BLOCK) * BLOCK)
            counts = sampler.count("estimate", [Asked(int(rows[i]), drawn, upto) for i in left])
            hits[left] += counts.numpy()[np.arange(len(left)), labels[left]]
            drawn = upto
            samples = np.full(len(left), float(drawn))
            claimed[left], still = ladder.climb(claimed[left], hits[left], samples)
            if drawn == self.n:
                still[:] = False
            settled[left] = np.where(still, 0, np.where(settled[left] > 0, settled[left], drawn))
            seconds[left] += (time.perf_counter() - start) / len(left)
            ready, left = left[~still.any(1)], left[still.any(1)]
            if len(ready):
                yield [
                    self._certificate(
                        int(rows[i]), int(labels[i]), claimed[i], drawn, seconds[i], settled[i]
                    )
                    for i in ready
                ]

    def _certificate(
        self,
        row: int,
        label: int,
        claimed: np.ndarray[Any, Any],
        samples: int,
        seconds: float,
        settled: np.ndarray[Any, Any],
    ) -> Certificate:
        reached = int(claimed.sum())
        reach = self.radii[reached - 1] if reached else 0.0
        predicted = label if reached else ABSTAIN
        return Certificate(row, predicted, reach, samples, float(seconds), tuple(settled.tolist()))
