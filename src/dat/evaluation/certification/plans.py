"""Sampling plans: CERTIFY as published, and a sequential one that stops as soon as it can."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dat.evaluation.certification.bounds import lower_bound, radius
from dat.evaluation.certification.certificates import Certificate
from dat.evaluation.certification.sampler import ABSTAIN, BLOCK, NoiseSampler, SampleRange
from dat.evaluation.certification.sequential import RadiusTests

GROWTH = 1.15
"""Factor by which the number of samples grows between two tests of an image."""
CONCURRENT = 64
"""Images sampled concurrently, so that the last samples of each still fill a batch."""


@dataclass(frozen=True)
class Fixed:
    """CERTIFY as published: `n0` samples to select a class, `n` to estimate its probability."""

    n0: int
    n: int
    alpha: float
    radii: tuple[float, ...] = ()

    def certify(self, sampler: NoiseSampler, rows: Sequence[int]) -> Iterator[list[Certificate]]:
        for row in rows:
            start = time.perf_counter()
            selected = int(sampler.count("select", [SampleRange(row, 0, self.n0)])[0].argmax())
            hits = int(sampler.count("estimate", [SampleRange(row, 0, self.n)])[0, selected])
            certified = float(radius(lower_bound(hits, self.n, self.alpha), sampler.sigma))
            predicted = selected if certified > 0 else ABSTAIN
            seconds = time.perf_counter() - start
            yield [Certificate(row, predicted, certified, self.n0 + self.n, seconds)]


@dataclass(frozen=True)
class Adaptive:
    """Tests for each of `radii` whether the label is certified within it."""

    radii: tuple[float, ...]
    n: int
    alpha: float

    def certify(self, sampler: NoiseSampler, rows: Sequence[int]) -> Iterator[list[Certificate]]:
        tests = RadiusTests(self.radii, sigma=sampler.sigma, alpha=self.alpha, budget=self.n)
        for first in range(0, len(rows), CONCURRENT):
            yield from self._decide(sampler, tests, np.array(rows[first : first + CONCURRENT]))

    def _decide(
        self, sampler: NoiseSampler, tests: RadiusTests, rows: np.ndarray[Any, Any]
    ) -> Iterator[list[Certificate]]:
        """Sample several images concurrently; each leaves once all its radii are decided."""
        labels = sampler.data.labels[torch.from_numpy(rows)].numpy()
        shape = (len(rows), len(self.radii))
        hits, seconds = np.zeros(len(rows)), np.zeros(len(rows))
        claimed = np.zeros(shape, dtype=bool)
        decided = np.zeros(shape, dtype=np.int64)
        active, drawn = np.arange(len(rows)), 0
        while len(active):
            start = time.perf_counter()
            stop = min(self.n, -(-int(max(drawn * GROWTH, drawn + 1)) // BLOCK) * BLOCK)
            counts = sampler.count(
                "estimate", [SampleRange(int(rows[i]), drawn, stop) for i in active]
            )
            hits[active] += counts.numpy()[np.arange(len(active)), labels[active]]
            drawn = stop
            samples = np.full(len(active), float(drawn))
            claimed[active], undecided = tests.update(claimed[active], hits[active], samples)
            if drawn == self.n:
                undecided[:] = False
            before = decided[active]
            decided[active] = np.where(undecided, 0, np.where(before > 0, before, drawn))
            seconds[active] += (time.perf_counter() - start) / len(active)
            finished, active = active[~undecided.any(1)], active[undecided.any(1)]
            if len(finished):
                yield [
                    self._certificate(
                        int(rows[i]), int(labels[i]), claimed[i], drawn, seconds[i], decided[i]
                    )
                    for i in finished
                ]

    def _certificate(
        self,
        row: int,
        label: int,
        claimed: np.ndarray[Any, Any],
        samples: int,
        seconds: float,
        decided: np.ndarray[Any, Any],
    ) -> Certificate:
        count = int(claimed.sum())
        certified = self.radii[count - 1] if count else 0.0
        predicted = label if count else ABSTAIN
        return Certificate(
            row, predicted, certified, samples, float(seconds), tuple(decided.tolist())
        )
