"""The planning job: a recipe and a cluster in, tables out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dat.config import RunConfig
from dat.planning.advice import HYBRID, Alternative, foresee, reason, recommend, ways
from dat.planning.cluster import Cluster
from dat.planning.costs import Costs
from dat.planning.scaling import Curve, scale
from dat.planning.subject import Subject, examine

SWEEPS = ("bits", "protocol", "nodes")
KINDS = ("weak", "strong")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was found."""

    recipe: str
    subject: Subject
    cluster: Cluster
    costs: Costs
    alternatives: Sequence[Alternative]
    chosen: Alternative
    why: str
    curves: Sequence[Curve]
    """Weak and strong scaling, if nodes were swept over."""

    def as_json(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "cluster": asdict(self.cluster) | {"workers": self.cluster.workers},
            "compute": asdict(self.subject.compute) | {"measured": self.subject.measured},
            "costs": asdict(self.costs),
            "values": self.subject.gradient.values,
            "batch": self.subject.config.train.batch,
            "alternatives": [_row(it) for it in self.alternatives],
            "recommended": {"protocol": self.chosen.step.protocol, "bits": self.chosen.step.bits},
            "why": self.why,
            "scaling": [
                {
                    "kind": curve.kind,
                    "way": curve.name,
                    "explanation": curve.explain(),
                    "points": [
                        {
                            "nodes": it.nodes,
                            "workers": it.workers,
                            "share": it.share,
                            "efficiency": it.efficiency,
                        }
                        | _row(it.found)
                        for it in curve.points
                    ],
                }
                for curve in self.curves
            ],
        }


def _row(it: Alternative) -> dict[str, Any]:
    step = it.step
    return {
        "protocol": step.protocol,
        "bits": step.bits,
        "step_seconds": step.step,
        "without_exchange_seconds": step.alone,
        "communication_seconds": step.communication,
        "exposed_seconds": step.exposed,
        "binds": step.binds,
        "steps": it.steps,
        "epoch_seconds": it.epoch,
        "communication_seconds_per_epoch": it.steps * step.communication,
        "bytes": step.sent,
        "bytes_busiest": step.busiest,
        "memory_bytes": it.memory.total,
        "memory": asdict(it.memory),
    }


def plan(
    config: RunConfig,
    recipe: str,
    *,
    cluster: Cluster,
    costs: Costs,
    seconds: float | None = None,
    sweep: Sequence[str] = ("bits", "protocol"),
) -> Plan:
    """Foresee a step of the recipe on a cluster, by all ways that are swept over."""
    check_sweep(sweep)
    batch = config.train.batch
    share = batch / cluster.workers
    if share < 1:
        raise ValueError(
            f"train.batch = {batch}: must be at least the number of workers, {cluster.workers}"
        )
    subject = examine(config, share, seconds, devices=cluster.devices)
    told = tuple(sweep)
    tried = ways(subject, cluster, told if set(told) != {"nodes"} else ("bits", "protocol"))
    found = [foresee(subject, cluster, way, costs=costs, share=share) for way in tried]
    if not found:
        raise ValueError("none of these protocols can do any of these bits on this cluster")
    chosen = recommend(found)
    curves = (
        _curves(subject, cluster, found=found, chosen=chosen, costs=costs)
        if "nodes" in told
        else []
    )
    return Plan(
        recipe=recipe,
        subject=subject,
        cluster=cluster,
        costs=costs,
        alternatives=found,
        chosen=chosen,
        why=reason(chosen, found),
        curves=curves,
    )


def _curves(
    subject: Subject,
    cluster: Cluster,
    *,
    found: Sequence[Alternative],
    chosen: Alternative,
    costs: Costs,
) -> list[Curve]:
    """Of the way that is recommended, of floats, and of the hierarchical one at 8 bits."""
    own = subject.config.quantizer
    names = [(chosen.step.protocol, chosen.step.bits), ("dense", 32), ("chunked", 8)]
    if any(it.step.protocol == HYBRID for it in found):
        names.append((HYBRID, 8))
    curves = [
        scale(
            subject,
            cluster,
            (protocol, replace(own, bits=bits)),
            costs=costs,
            kind=kind,
            batch=subject.config.train.batch,
        )
        for kind in KINDS
        for protocol, bits in dict.fromkeys(names)
    ]
    return [curve for curve in curves if curve.points]


def check_sweep(sweep: Sequence[str]) -> None:
    for word in sweep:
        if word not in SWEEPS:
            raise ValueError(f"--sweep {word}: must be one or more of {', '.join(SWEEPS)}")
