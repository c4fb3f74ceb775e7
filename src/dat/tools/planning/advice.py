"""The alternatives for exchanging a recipe's gradient on a cluster, and a recommendation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dat.distributed import (
    CONCRETE_PROTOCOLS,
    PROTOCOLS,
    Quantizer,
    choose_default,
    protocol_name,
)
from dat.tools.planning.cluster import Cluster
from dat.tools.planning.costs import Costs
from dat.tools.planning.memory import MemoryEstimate, estimate_memory
from dat.tools.planning.model import Prediction, predict
from dat.tools.planning.recipe import RecipeProfile

BITS = (32, 8, 4)
ALL_BITS = (32, 16, 8, 6, 4, 3, 2)
HYBRID = "hybrid"
TOLERANCE = 0.1
"""A scheme with fewer levels has to save this share of a step to be worth its noise."""
MIN_LEVELS = 7
"""The levels of 4 bits: with fewer, accuracy has not been shown to hold."""


class Scheme(NamedTuple):
    """A protocol, and the quantizer of its messages."""

    protocol: str
    quantizer: Quantizer


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """What is predicted for a scheme."""

    step: Prediction
    memory: MemoryEstimate
    steps: int
    """Steps per epoch."""

    @property
    def epoch(self) -> float:
        return self.steps * self.step.step

    @property
    def name(self) -> str:
        return f"{self.step.protocol}, {self.step.bits} bits"


def is_possible(scheme: Scheme, cluster: Cluster) -> bool:
    """Whether the protocol supports these bits on this cluster."""
    return PROTOCOLS[scheme.protocol]().applicable(scheme.quantizer, cluster)


def possible_schemes(
    profile: RecipeProfile, cluster: Cluster, sweep: Sequence[str]
) -> Iterator[Scheme]:
    """All possible combinations of protocols and bits. Those that are not swept over are the
    recipe's."""
    own = profile.config.quantizer
    bits = (own.bits,) if "bits" not in sweep else ALL_BITS if sweep == ("bits",) else BITS
    for count in sorted({*bits}, reverse=True):
        quantizer = replace(own, bits=count)
        own_protocol = (_own_protocol(profile, quantizer),)
        for protocol in CONCRETE_PROTOCOLS if "protocol" in sweep else own_protocol:
            scheme = Scheme(protocol, quantizer)
            if is_possible(scheme, cluster):
                yield scheme


def _own_protocol(profile: RecipeProfile, quantizer: Quantizer) -> str:
    """The recipe's protocol; `auto` is planned like the default."""
    return protocol_name(choose_default(quantizer, profile.config.protocol))


def estimate(
    profile: RecipeProfile,
    cluster: Cluster,
    scheme: Scheme,
    *,
    costs: Costs,
    share: float,
    ratio: float = 1.0,
) -> Alternative:
    """Predict a step of workers with `share` images each; `ratio` is the time of a pass, as a
    fraction of one at full image size."""
    step = predict(
        profile.gradient,
        profile.compute.of(share, ratio),
        protocol=scheme.protocol,
        quantizer=scheme.quantizer,
        cluster=cluster,
        costs=costs,
    )
    channels, height, width = profile.shape.image
    memory = estimate_memory(
        profile.config,
        values=profile.gradient.values,
        activations=profile.activations,
        pixels=channels * height * width,
        images=share,
        exchange=step.buffers,
    )
    return Alternative(step=step, memory=memory, steps=profile.steps(share * cluster.workers))


def levels(alternative: Alternative) -> int:
    """Quantization levels of a worker on either side of zero."""
    step = alternative.step
    return PROTOCOLS[step.protocol]().levels(Quantizer(bits=step.bits), step.workers)


def eligible(alternatives: Sequence[Alternative]) -> list[Alternative]:
    """Those that are fine enough; all, if none is."""
    return [one for one in alternatives if levels(one) >= MIN_LEVELS] or list(alternatives)


def recommend(alternatives: Sequence[Alternative]) -> Alternative:
    """The finest of the nearly fastest; of equally fine ones torch's own all-reduce, then the
    fastest."""
    candidates = eligible(alternatives)
    fastest = min(one.step.step for one in candidates)
    near = [one for one in candidates if one.step.step <= fastest * (1 + TOLERANCE)]
    return min(near, key=lambda one: (-levels(one), one.step.protocol != "dense", one.step.step))


def explain(chosen: Alternative, alternatives: Sequence[Alternative]) -> str:
    """The reason for the recommendation, in one sentence."""
    step = chosen.step
    if step.workers == 1:
        return f"{chosen.name}: a single worker has nothing to exchange."
    fastest = min(eligible(alternatives), key=lambda one: one.step.step)
    dense = next((one for one in alternatives if one.step.protocol == "dense"), None)
    if dense is None or chosen is dense:
        hidden = 100 * (1 - min(step.exposed / max(step.communication, 1e-12), 1))
        gain = 100 * (step.step / fastest.step.step - 1)
        tail = f"fewer bits would save at most {gain:.0f} %" if gain >= 0.5 else "none is faster"
        return (
            f"{chosen.name}: {hidden:.0f} % of the exchange overlaps with the backward pass, and "
            f"{tail}."
        )
    speedup = dense.step.step / step.step
    sentence = (
        f"{chosen.name}: a step is {speedup:.2f} times as fast as with {dense.name}, since "
        f"{step.exposed:.3g} s of the exchange are exposed instead of {dense.step.exposed:.3g} s "
        f"(bottleneck there: {dense.step.binds})"
    )
    if fastest is not chosen:
        saved = 100 * (1 - fastest.step.step / step.step)
        sentence += f"; {fastest.name} would save another {saved:.0f} %, with more noise"
    return f"{sentence}."
