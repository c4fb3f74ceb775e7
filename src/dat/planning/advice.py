"""All ways to exchange a recipe's gradient on a cluster, and which of them to take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dat.comm import PROTOCOLS, Quantizer, choose_default, protocol_name
from dat.fields import SettingError
from dat.planning.cluster import Cluster
from dat.planning.costs import Costs
from dat.planning.memory import Memory, memory_of
from dat.planning.model import Prediction, predict
from dat.planning.subject import Subject
from dat.planning.traffic import ROUTES

BITS = (32, 8, 4)
ALL_BITS = (32, 16, 8, 6, 4, 3, 2)
HYBRID = "hybrid"
WORTH = 0.1
"""A way with fewer levels has to save so much of a step to be worth its noise."""
LEVELS = 7
"""Those of 4 bits: with fewer, accuracy has not been shown to stay."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A way to exchange, and what comes of it."""

    step: Prediction
    memory: Memory
    steps: int
    """In an epoch."""

    @property
    def epoch(self) -> float:
        return self.steps * self.step.step

    @property
    def name(self) -> str:
        bits = f"{self.step.bits} bits"
        return f"{self.step.protocol}, {bits}"


def possible(protocol: str, quantizer: Quantizer, cluster: Cluster) -> bool:
    """Whether a protocol can do so many bits on so many workers."""
    if protocol == HYBRID:
        return cluster.devices > 1 and cluster.nodes > 1
    try:
        PROTOCOLS[protocol]().check(quantizer, cluster.workers)
    except SettingError:
        return False
    return True


def ways(
    subject: Subject, cluster: Cluster, sweep: Sequence[str]
) -> Iterator[tuple[str, Quantizer]]:
    """Every protocol with every number of bits that it can do, as far as they are swept over; else
    those of the recipe."""
    own = subject.config.quantizer
    bits = (own.bits,) if "bits" not in sweep else ALL_BITS if sweep == ("bits",) else BITS
    protocols = tuple(ROUTES) if "protocol" in sweep else None
    for count in sorted({*bits}, reverse=True):
        quantizer = replace(own, bits=count)
        told = protocols or (usual(subject, quantizer),)
        for protocol in told:
            if possible(protocol, quantizer, cluster):
                yield protocol, quantizer


def usual(subject: Subject, quantizer: Quantizer) -> str:
    """The recipe's protocol; `auto` is planned for as the default."""
    return protocol_name(choose_default(quantizer, subject.config.protocol))


def foresee(
    subject: Subject,
    cluster: Cluster,
    way: tuple[str, Quantizer],
    *,
    costs: Costs,
    share: float,
) -> Alternative:
    """A step of workers with a share of so many images each."""
    protocol, quantizer = way
    step = predict(
        subject.gradient,
        subject.compute.of(share),
        protocol=protocol,
        quantizer=quantizer,
        cluster=cluster,
        costs=costs,
    )
    channels, height, width = subject.shape.image
    memory = memory_of(
        subject.config,
        values=subject.gradient.values,
        activations=subject.activations,
        pixels=channels * height * width,
        images=share,
        exchange=step.buffers,
    )
    return Alternative(step=step, memory=memory, steps=subject.steps(share * cluster.workers))


def levels(it: Alternative) -> int:
    """Steps on either side of zero that a worker's values have: a ring shares them out."""
    whole = (1 << (it.step.bits - 1)) - 1
    return whole // it.step.workers if it.step.protocol == "ring" else whole


def eligible(alternatives: Sequence[Alternative]) -> list[Alternative]:
    """Those that there are (a protocol may be planned with before it is there), and that are fine
    enough."""
    there = [it for it in alternatives if it.step.protocol in PROTOCOLS]
    return [it for it in there if levels(it) >= LEVELS] or list(alternatives)


def recommend(alternatives: Sequence[Alternative]) -> Alternative:
    """The finest of those that are nearly the fastest, floats by torch's own sum first; of equals
    the fastest."""
    known = eligible(alternatives)
    fastest = min(it.step.step for it in known)
    near = [it for it in known if it.step.step <= fastest * (1 + WORTH)]
    return min(near, key=lambda it: (-levels(it), it.step.protocol != "dense", it.step.step))


def reason(chosen: Alternative, alternatives: Sequence[Alternative]) -> str:
    """Why, in a sentence."""
    step = chosen.step
    if step.workers == 1:
        return f"{chosen.name}: one worker has nobody to exchange with."
    fastest = min(eligible(alternatives), key=lambda it: it.step.step)
    others = [it for it in alternatives if it.step.protocol == "dense"]
    dense = others[0] if others else None
    hidden = 100 * (1 - min(step.exposed / max(step.communication, 1e-12), 1))
    if dense is None or chosen is dense:
        gain = 100 * (step.step / fastest.step.step - 1)
        tail = f"fewer bits would save at most {gain:.0f} %" if gain >= 0.5 else "none is faster"
        return (
            f"{chosen.name}: {hidden:.0f} % of the exchange is hidden behind the backward pass, "
            f"and {tail}."
        )
    times = dense.step.step / step.step
    told = (
        f"{chosen.name}: a step is {times:.2f} times as fast as with {dense.name}, as "
        f"{step.exposed:.3g} s of the exchange are exposed instead of {dense.step.exposed:.3g} s "
        f"(what binds there: {dense.step.binds})"
    )
    if fastest is not chosen:
        saved = 100 * (1 - fastest.step.step / step.step)
        told += f"; {fastest.name} would save another {saved:.0f} %, for more noise"
    return f"{told}."
