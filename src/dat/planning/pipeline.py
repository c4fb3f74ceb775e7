"""A small simulation: activities that run beside each other and share what there is of everything.

An activity has a least duration and demands on resources (seconds of cores, bytes of a link). As
long as nothing is short it takes its least duration. A resource that is short is shared out evenly
among the threads that want it, and who wants less than an even share gets all of it, as operating
systems and TCP do. Activities follow each other in chains; a chain's activity may have to wait for
another chain's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

ROUNDS = 8
"""To settle who gets what: one resource's shortage relieves another."""
NOTHING = 1e-12


@dataclass(eq=False)
class Activity:
    """Something that takes time."""

    least: float
    """Seconds if nothing is short."""
    demands: Mapping[str, float] = field(default_factory=dict)
    """Of each resource, in its unit: what all workers need that share it."""
    threads: float = 1.0
    """Among so many the demands are divided when a resource is shared out."""
    after: Sequence[Activity] = ()
    """What has to be done before, besides the activity before it in its chain."""
    label: str = ""
    started: float | None = None
    ended: float | None = None
    left: float = 1.0
    """The part of it that is still to be done."""


def run(chains: Sequence[Sequence[Activity]], capacities: Mapping[str, float]) -> float:
    """Let all activities happen; each then knows when it began and ended. Gives the end of all."""
    now = 0.0
    positions = [0] * len(chains)
    while True:
        _begin(chains, positions, now)
        active = [
            chain[at]
            for chain, at in zip(chains, positions, strict=True)
            if at < len(chain) and chain[at].started is not None
        ]
        if not active:
            assert all(at == len(chain) for chain, at in zip(chains, positions, strict=True))
            return now
        speeds = share(active, capacities)
        soonest = min(it.left / speed for it, speed in zip(active, speeds, strict=True))
        now += soonest
        for it, speed in zip(active, speeds, strict=True):
            it.left -= soonest * speed
            if it.left <= NOTHING:
                it.left, it.ended = 0.0, now


def _begin(chains: Sequence[Sequence[Activity]], positions: list[int], now: float) -> None:
    """Begin whatever can; what takes no time at all ends at once."""
    moved = True
    while moved:
        moved = False
        for number, chain in enumerate(chains):
            while positions[number] < len(chain) and chain[positions[number]].ended is not None:
                positions[number] += 1
                moved = True
            if positions[number] == len(chain):
                continue
            it = chain[positions[number]]
            if it.started is None and all(other.ended is not None for other in it.after):
                it.started = now
                if it.least <= 0 and not any(it.demands.values()):
                    it.ended = now
                moved = True


def share(active: Sequence[Activity], capacities: Mapping[str, float]) -> list[float]:
    """The speed of each, as a part of the whole a second."""
    speeds = [1 / max(it.least, NOTHING) for it in active]
    for _ in range(ROUNDS):
        short = False
        for resource, capacity in capacities.items():
            wanted = [
                it.demands.get(resource, 0.0) * speed
                for it, speed in zip(active, speeds, strict=True)
            ]
            if sum(wanted) <= capacity * (1 + 1e-9):
                continue
            short = True
            given = water_fill(wanted, [it.threads for it in active], capacity)
            speeds = [
                speed * got / want if want > 0 else speed
                for speed, want, got in zip(speeds, wanted, given, strict=True)
            ]
        if not short:
            break
    return speeds


def water_fill(wanted: Sequence[float], threads: Sequence[float], capacity: float) -> list[float]:
    """Nobody gets more than wanted, and all who get less get alike, thread by thread."""
    given = [0.0] * len(wanted)
    order = sorted(range(len(wanted)), key=lambda i: wanted[i] / threads[i])
    left, crowd = capacity, sum(threads)
    for i in order:
        given[i] = min(wanted[i], left * threads[i] / crowd)
        left -= given[i]
        crowd -= threads[i]
    return given
