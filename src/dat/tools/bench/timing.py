"""Timing that all benchmarks share: the implementations take turns, medians are reported, and each
is compared with the best that the machine can do."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dat.report import counting

Turn = Callable[[], object]
"""One unit of work of an implementation, the same for all of them."""


@dataclass(frozen=True)
class Timing:
    """The seconds of all turns of an implementation."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The lower and the upper quartile."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    def over(self, other: Timing) -> tuple[float, float, float]:
        """The median ratio to the other's turn in the same round, and its 95 % interval. The
        machine's speed drifts over time, but hardly within a round."""
        ratios = sorted(mine / its for mine, its in zip(self.seconds, other.seconds, strict=True))
        cut = _interval_rank(len(ratios))
        return statistics.median(ratios), ratios[cut], ratios[-1 - cut]


def _interval_rank(count: int) -> int:
    """How many of `count` sorted values to drop at either end for a 95 % interval of the median:
    each value lies below the median with probability one half."""
    below, cut = 0.0, -1
    while below <= 0.025:
        cut += 1
        below += math.comb(count, cut) / 2**count
    return max(cut - 1, 0)


def take_turns(
    turns: Mapping[str, Turn],
    *,
    repeats: int,
    seconds: float = 0.0,
    warmup: int = 1,
    title: str = "",
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time all implementations once per round, so that a disturbance affects all of them; the order
    rotates from round to round. After the warm-up there are at least `repeats` rounds, and more
    until `seconds` have passed."""
    names, taken = list(turns), {name: list[float]() for name in turns}
    begun, number = clock(), 0
    with counting(title, (repeats + warmup) * len(names), show=bool(title)) as progress:
        while number < warmup + repeats or clock() - begun < seconds:
            first = number % len(names)
            for name in names[first:] + names[:first]:
                start = clock()
                turns[name]()
                taken[name].append(clock() - start)
                progress(1)
            number += 1
            if number == warmup:
                begun = clock()
    return {name: Timing(tuple(times[warmup:])) for name, times in taken.items()}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The timings of several implementations of the same work, and the machine they ran on."""

    bench: str
    timings: Mapping[str, Timing]
    """The first is the reference of all ratios."""
    machine: Mapping[str, Any]
    """Threads, allocator, peak rates."""
    images: int = 0
    """Images per turn; 0 if the benchmark does not count images."""
    least: Mapping[str, float] = field(default_factory=dict)
    """Lower bound on the seconds of a turn on this machine."""
    limit: str = ""
    """How the lower bound was obtained."""
    flops: Mapping[str, float] = field(default_factory=dict)
    """Floating-point operations per turn."""
    traffic: Mapping[str, float] = field(default_factory=dict)
    """Lower bound on the bytes that a turn moves."""
    extras: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Other measurements of an implementation."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """One row per implementation; `ratio` is its speed relative to the first."""
        first = next(iter(self.timings.values())).median
        return [self._row(name, timing, first) for name, timing in self.timings.items()]

    def _row(self, name: str, timing: Timing, first: float) -> dict[str, Any]:
        median, (low, high) = timing.median, timing.quartiles
        row: dict[str, Any] = {
            "name": name,
            "seconds": median,
            "seconds_low": low,
            "seconds_high": high,
            "turns": len(timing.seconds),
            "ratio": first / median,
        }
        if self.images:
            row["images_per_second"] = self.images / median
        if name in self.least:
            row |= {"limit_seconds": self.least[name], "limit_share": self.least[name] / median}
        if name in self.flops:
            row["gflops"] = self.flops[name] / median / 1e9
        if name in self.traffic:
            row["gb_per_second"] = self.traffic[name] / median / 1e9
        return row | dict(self.extras.get(name, {}))

    def dump(self) -> dict[str, Any]:
        return {
            "bench": self.bench,
            "settings": dict(self.settings),
            "machine": dict(self.machine),
            "images": self.images,
            "limit": self.limit,
            "rows": self.rows(),
            "notes": list(self.notes),
        }
