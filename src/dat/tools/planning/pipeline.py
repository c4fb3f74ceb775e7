"""A small simulation of concurrent activities that share resources.

An activity has a minimum duration and demands on resources (CPU seconds, bytes on a link). While no
resource is scarce, it takes its minimum duration. A scarce resource is divided evenly among the
threads that need it, and those that need less than an even share get all they need (max-min
fairness, as in operating systems and TCP). Activities run one after another in chains, and may wait
for activities of other chains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

ROUNDS = 8
"""Iterations to allocate resources: scarcity of one lowers the demand for another."""
EPSILON = 1e-12


@dataclass(eq=False)
class Activity:
    """A piece of work that takes time."""

    least: float
    """Seconds if no resource is scarce."""
    demands: Mapping[str, float] = field(default_factory=dict)
    """Total demand of all workers that share a resource, in its unit."""
    threads: float = 1.0
    """Threads that the demands are spread over; each gets a share of a scarce resource."""
    after: Sequence[Activity] = ()
    """Activities of other chains that must end first."""
    label: str = ""
    started: float | None = None
    ended: float | None = None
    left: float = 1.0
    """The fraction that remains."""


def run(chains: Sequence[Sequence[Activity]], capacities: Mapping[str, float]) -> float:
    """Simulate all activities, setting when each starts and ends; return when the last one ends."""
    now = 0.0
    positions = [0] * len(chains)
    while True:
        _begin(chains, positions, now)
        active = [
            chain[position]
            for chain, position in zip(chains, positions, strict=True)
            if position < len(chain) and chain[position].started is not None
        ]
        if not active:
            assert positions == [len(chain) for chain in chains]
            return now
        speeds = share(active, capacities)
        soonest = min(one.left / speed for one, speed in zip(active, speeds, strict=True))
        now += soonest
        for activity, speed in zip(active, speeds, strict=True):
            activity.left -= soonest * speed
            if activity.left <= EPSILON:
                activity.left, activity.ended = 0.0, now


def _begin(chains: Sequence[Sequence[Activity]], positions: list[int], now: float) -> None:
    """Start all activities that can start; those that take no time end at once."""
    moved = True
    while moved:
        moved = False
        for number, chain in enumerate(chains):
            while positions[number] < len(chain) and chain[positions[number]].ended is not None:
                positions[number] += 1
                moved = True
            if positions[number] == len(chain):
                continue
            following = chain[positions[number]]
            is_ready = all(other.ended is not None for other in following.after)
            if following.started is None and is_ready:
                following.started = now
                if following.least <= 0 and not any(following.demands.values()):
                    following.ended = now
                moved = True


def share(active: Sequence[Activity], capacities: Mapping[str, float]) -> list[float]:
    """The speed of each activity, as a fraction per second."""
    speeds = [1 / max(activity.least, EPSILON) for activity in active]
    for _ in range(ROUNDS):
        scarce = False
        for resource, capacity in capacities.items():
            wanted = [
                activity.demands.get(resource, 0.0) * speed
                for activity, speed in zip(active, speeds, strict=True)
            ]
            if sum(wanted) <= capacity * (1 + 1e-9):
                continue
            scarce = True
            given = water_fill(wanted, [activity.threads for activity in active], capacity)
            speeds = [
                speed * got / want if want > 0 else speed
                for speed, want, got in zip(speeds, wanted, given, strict=True)
            ]
        if not scarce:
            break
    return speeds


def water_fill(wanted: Sequence[float], threads: Sequence[float], capacity: float) -> list[float]:
    """Max-min fair shares: none exceeds what is wanted, and all that fall short get the same per
    thread."""
    given = [0.0] * len(wanted)
    order = sorted(range(len(wanted)), key=lambda i: wanted[i] / threads[i])
    left, waiting = capacity, sum(threads)
    for i in order:
        given[i] = min(wanted[i], left * threads[i] / waiting)
        left -= given[i]
        waiting -= threads[i]
    return given
