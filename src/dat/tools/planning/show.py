"""Show a plan as tables, sentences and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dat.core.glossary import plural
from dat.report import print_json, print_table, print_text
from dat.report.plots import Chart, line_charts
from dat.tools.planning.costs import BUILT_IN, Costs
from dat.tools.planning.job import ClusterPlan
from dat.tools.planning.scaling import ScalingCurve

HEADERS = [
    *("Protocol", "Bits", "Step (s)", "Exposed (s)", "C (s)", "Epoch (s)", "C/epoch (s)"),
    *("MB/it", "Busiest (MB)", "Memory (MB)", "Bottleneck"),
]
LEGEND = (
    "Step: seconds per training step; exposed: the part that the exchange adds to it. C: seconds "
    "during which an exchange is in progress, overlapped or not. MB/it: megabytes sent per step by "
    "all workers; busiest: by the worker that sends most. Memory: of a device, at the peak of a "
    "step. Bottleneck: what an exchange spends most of its time on."
)


def show_plan(plan: ClusterPlan, *, as_json: bool, plot: Path | None) -> None:
    if plot:
        draw(plan, plot)
    if as_json:
        print_json(plan.as_json())
        return
    print_table(HEADERS, _rows(plan), note=LEGEND, optional=("C/epoch (s)", "Busiest (MB)"))
    print_text(f"\n{describe(plan)}")
    if plan.sizes:
        print_text(f"\nStep by image size (train.resize), {plan.chosen.name}:")
        print_table(
            ["Shorter side (px)", "Epochs", "Step (s)", "Exposed (s)", "Epoch (s)"], _sizes(plan)
        )
        print_text(f"All epochs: {plan.training:,.0f} s.")
    for curve in plan.curves:
        print_text(f"\n{curve.kind.capitalize()} scaling, {curve.name}:")
        print_table(["Nodes", "Workers", "Images", "Step (s)", "Exposed (s)", "%"], _points(curve))
    if plan.curves:
        print()
        for curve in plan.curves:
            print_text(curve.explain())
        print_text("These are predictions: only small clusters have been measured.")
    print_text(f"\nRecommended: {plan.why}")


def describe(plan: ClusterPlan) -> str:
    """What the predictions are based on."""
    profile, cluster = plan.profile, plan.cluster
    compute = profile.compute.of(profile.config.train.batch / cluster.workers)
    how = (
        f"measured here with {plural(profile.compute.images, 'random image')} and scaled; reading "
        "and decoding images is not included"
        if profile.measured
        else "as given"
    )
    lines = [
        f"{plan.recipe} on {cluster.nodes:,} x {cluster.devices} workers, "
        f"{plural(compute.images, 'image')} each, {profile.gradient.values:,} parameters.",
        f"Without an exchange, a step takes {compute.total:.3g} s ({how}).",
        f"Costs of kernels and messages: {describe_costs(plan.costs)}",
    ]
    return "\n".join(lines)


def describe_costs(costs: Costs) -> str:
    """Where the costs come from."""
    if costs.origin != BUILT_IN:
        return f"{costs.origin}."
    return "built-in values (--json lists them); dat plan --calibrate measures this machine."


def show_costs(costs: Costs, path: Path, *, as_json: bool) -> None:
    if as_json:
        print_json(vars(costs))
        return
    print_table(["What", "Cost"], [list(row) for row in costs.describe()])
    print(f"\n{costs.origin}; saved in {path}")


def _rows(plan: ClusterPlan) -> list[list[str]]:
    rows = []
    for alternative in plan.alternatives:
        step = alternative.step
        seconds = (step.step, step.exposed, step.communication)
        rows.append(
            [
                step.protocol,
                str(step.bits),
                *(f"{value:.3f}" for value in seconds),
                f"{alternative.epoch:.1f}",
                f"{alternative.steps * step.communication:.1f}",
                f"{step.sent / 1e6:.1f}",
                f"{step.busiest / 1e6:.1f}",
                f"{alternative.memory.total / 1e6:,.0f}",
                step.binds,
            ]
        )
    return rows


def _sizes(plan: ClusterPlan) -> list[list[str]]:
    return [
        [
            str(phase.size),
            str(phase.epochs),
            f"{alternative.step.step:.3f}",
            f"{alternative.step.exposed:.3f}",
            f"{alternative.epoch:.1f}",
        ]
        for phase, alternative in plan.sizes
    ]


def _points(curve: ScalingCurve) -> list[list[str]]:
    return [
        [
            f"{point.nodes:,}",
            f"{point.workers:,}",
            f"{point.share:.4g}",
            f"{point.predicted.step.step:.3f}",
            f"{point.predicted.step.exposed:.3f}",
            f"{100 * point.efficiency:.0f}",
        ]
        for point in curve.points
    ]


def draw(plan: ClusterPlan, path: Path) -> None:
    """Plot efficiency over workers, if nodes are swept over; else seconds per step over bits."""
    title = f"{plan.recipe}, predicted"
    if plan.curves:
        charts = [
            Chart(_lines(plan.curves, kind), "workers", f"% of ideal, {kind} scaling", True)
            for kind in dict.fromkeys(curve.kind for curve in plan.curves)
        ]
    else:
        lines: dict[str, tuple[list[float], list[float]]] = {}
        for alternative in plan.alternatives:
            xs, ys = lines.setdefault(alternative.step.protocol, ([], []))
            xs.append(alternative.step.bits)
            ys.append(alternative.step.step)
        charts = [Chart(lines, "bits", "seconds per step", True)]
    line_charts(path, charts, title=title)


def _lines(curves: Sequence[ScalingCurve], kind: str) -> dict[str, tuple[list[float], list[float]]]:
    return {
        curve.name: (
            [float(point.workers) for point in curve.points],
            [100 * point.efficiency for point in curve.points],
        )
        for curve in curves
        if curve.kind == kind
    }
