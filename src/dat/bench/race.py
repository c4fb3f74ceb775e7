"""What all measurements share: contestants take turns, the medians count, and beside each stands
what the machine could do at best."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dat.report import counting

Job = Callable[[], object]
"""What a contestant does in its turn."""


@dataclass(frozen=True)
class Timing:
    """The seconds of all turns of a contestant."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Half of the turns took longer than the one and less than the other."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    def over(self, other: Timing) -> tuple[float, float, float]:
        """The median of what a turn took over what the other's took in the same round, and a 95 %
        interval of it: the machine's speed drifts, but hardly within a round."""
        ratios = sorted(mine / its for mine, its in zip(self.seconds, other.seconds, strict=True))
        cut = _rank(len(ratios))
        return statistics.median(ratios), ratios[cut], ratios[-1 - cut]


def _rank(count: int) -> int:
    """How many of so many values may be cut off at either end for the rest to span their median in
    95 cases of 100: each value lies below it with probability one half."""
    below, cut = 0.0, -1
    while below <= 0.025:
        cut += 1
        below += math.comb(count, cut) / 2**count
    return max(cut - 1, 0)


def take_turns(
    jobs: Mapping[str, Job],
    *,
    repeats: int,
    seconds: float = 0.0,
    warmup: int = 1,
    title: str = "",
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Round by round every job once, so that a disturbance meets all alike; who begins changes from
    round to round. After the warm-up there are `repeats` rounds, and more until `seconds` are
    over."""
    names, taken = list(jobs), {name: list[float]() for name in jobs}
    begun, number = clock(), 0
    with counting(title, (repeats + warmup) * len(names), show=bool(title)) as progress:
        while number < warmup + repeats or clock() - begun < seconds:
            first = number % len(names)
            for name in names[first:] + names[:first]:
                start = clock()
                jobs[name]()
                taken[name].append(clock() - start)
                progress(1)
            number += 1
            if number == warmup:
                begun = clock()
    return {name: Timing(tuple(times[warmup:])) for name, times in taken.items()}


@dataclass(frozen=True, kw_only=True)
class Race:
    """A measurement: who took how long for the same work, on which machine."""

    bench: str
    timings: Mapping[str, Timing]
    """The first is what the others are compared with."""
    machine: Mapping[str, Any]
    """Threads, allocator, peak rates."""
    images: int = 0
    """In a turn; 0 where images are not what is counted."""
    least: Mapping[str, float] = field(default_factory=dict)
    """The seconds that the machine needs at least for what a contestant does in a turn."""
    limit: str = ""
    """How that was found."""
    flops: Mapping[str, float] = field(default_factory=dict)
    """Floating-point operations of a turn."""
    traffic: Mapping[str, float] = field(default_factory=dict)
    """Bytes that a turn must move at least."""
    extras: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What else was found about a contestant."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """A row a contestant; `ratio` is how many times as fast as the first it is."""
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
