"""The planning job: predict a recipe's training on a cluster and recommend how to exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dat.config.schema import RunConfig
from dat.tools.planning.advice import (
    HYBRID,
    Alternative,
    Scheme,
    estimate,
    explain,
    possible_schemes,
    recommend,
)
from dat.tools.planning.cluster import Cluster
from dat.tools.planning.costs import Costs
from dat.tools.planning.recipe import RecipeProfile, profile_recipe
from dat.tools.planning.scaling import ScalingCurve, ScalingPoint, scale
from dat.tools.planning.sweeps import check_sweep
from dat.tools.planning.timing import SizePhase

KINDS = ("weak", "strong")


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """The result of `plan`."""

    recipe: str
    profile: RecipeProfile
    cluster: Cluster
    costs: Costs
    alternatives: Sequence[Alternative]
    chosen: Alternative
    why: str
    curves: Sequence[ScalingCurve]
    """Weak and strong scaling, if nodes are swept over."""
    sizes: Sequence[tuple[SizePhase, Alternative]] = ()
    """The recommended scheme at each image size of training, if it changes."""

    @property
    def training(self) -> float:
        """Seconds of all epochs at these sizes."""
        return sum(phase.epochs * alternative.epoch for phase, alternative in self.sizes)

    def as_json(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "cluster": asdict(self.cluster) | {"workers": self.cluster.workers},
            "compute": asdict(self.profile.compute) | {"measured": self.profile.measured},
            "costs": asdict(self.costs),
            "values": self.profile.gradient.values,
            "batch": self.profile.config.train.batch,
            "alternatives": [_row(alternative) for alternative in self.alternatives],
            "recommended": {"protocol": self.chosen.step.protocol, "bits": self.chosen.step.bits},
            "why": self.why,
            "sizes": [phase._asdict() | _row(one) for phase, one in self.sizes],
            "scaling": [
                {
                    "kind": curve.kind,
                    "way": curve.name,
                    "explanation": curve.explain(),
                    "points": [_point(point) for point in curve.points],
                }
                for curve in self.curves
            ],
        }


def _row(alternative: Alternative) -> dict[str, Any]:
    step = alternative.step
    return {
        "protocol": step.protocol,
        "bits": step.bits,
        "step_seconds": step.step,
        "without_exchange_seconds": step.alone,
        "communication_seconds": step.communication,
        "exposed_seconds": step.exposed,
        "binds": step.binds,
        "steps": alternative.steps,
        "epoch_seconds": alternative.epoch,
        "communication_seconds_per_epoch": alternative.steps * step.communication,
        "bytes": step.sent,
        "bytes_busiest": step.busiest,
        "memory_bytes": alternative.memory.total,
        "memory": asdict(alternative.memory),
    }


def _point(point: ScalingPoint) -> dict[str, Any]:
    size = {"nodes": point.nodes, "workers": point.workers, "share": point.share}
    return size | {"efficiency": point.efficiency} | _row(point.predicted)


def plan(
    config: RunConfig,
    recipe: str,
    *,
    cluster: Cluster,
    costs: Costs,
    seconds: float | None = None,
    sweep: Sequence[str] = ("bits", "protocol"),
) -> ClusterPlan:
    """Predict a step of the recipe on a cluster, for all schemes that are swept over."""
    check_sweep(sweep)
    batch = config.train.batch
    share = batch / cluster.workers
    if share < 1:
        raise ValueError(
            f"train.batch = {batch}: must be at least the number of workers, {cluster.workers}"
        )
    profile = profile_recipe(config, share, seconds, devices=cluster.devices)
    varied = tuple(sweep) if set(sweep) != {"nodes"} else ("bits", "protocol")
    alternatives = [
        estimate(profile, cluster, scheme, costs=costs, share=share)
        for scheme in possible_schemes(profile, cluster, varied)
    ]
    if not alternatives:
        raise ValueError("none of these protocols supports any of these bits on this cluster")
    chosen = recommend(alternatives)
    curves: list[ScalingCurve] = []
    if "nodes" in sweep:
        has_hybrid = any(one.step.protocol == HYBRID for one in alternatives)
        curves = _curves(profile, cluster, chosen, costs=costs, hybrid=has_hybrid)
    return ClusterPlan(
        recipe=recipe,
        profile=profile,
        cluster=cluster,
        costs=costs,
        alternatives=alternatives,
        chosen=chosen,
        why=explain(chosen, alternatives),
        curves=curves,
        sizes=_by_size(profile, cluster, chosen, costs=costs, share=share),
    )


def _by_size(
    profile: RecipeProfile, cluster: Cluster, chosen: Alternative, *, costs: Costs, share: float
) -> list[tuple[SizePhase, Alternative]]:
    scheme = Scheme(chosen.step.protocol, replace(profile.config.quantizer, bits=chosen.step.bits))
    return [
        (phase, estimate(profile, cluster, scheme, costs=costs, share=share, ratio=phase.ratio))
        for phase in profile.sizes
    ]


def _curves(
    profile: RecipeProfile, cluster: Cluster, chosen: Alternative, *, costs: Costs, hybrid: bool
) -> list[ScalingCurve]:
    """Of the recommended scheme, of floats, and of chunked and hybrid at 8 bits."""
    own, batch = profile.config.quantizer, profile.config.train.batch
    names = [(chosen.step.protocol, chosen.step.bits), ("dense", 32), ("chunked", 8)]
    if hybrid:
        names.append((HYBRID, 8))
    schemes = [Scheme(name, replace(own, bits=bits)) for name, bits in dict.fromkeys(names)]
    curves = [
        scale(profile, cluster, scheme, costs=costs, kind=kind, batch=batch)
        for kind in KINDS
        for scheme in schemes
    ]
    return [curve for curve in curves if curve.points]
