"""A plan for people: tables, sentences, pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dat.planning.costs import BUILT_IN, Costs
from dat.planning.job import Plan
from dat.planning.scaling import Curve
from dat.report import print_json, print_table
from dat.report.plots import Chart, line_charts

HEADERS = [
    *("Protocol", "Bits", "Step (s)", "Exposed (s)", "C (s)", "Epoch (s)", "C/epoch (s)"),
    *("MB/it", "Busiest (MB)", "Memory (MB)", "Binds"),
]
LEGEND = (
    "Step: seconds of a training step; exposed: what it takes longer than without an exchange. "
    "C: seconds in which an exchange is under way, hidden or not. MB/it: megabytes that all "
    "workers send in a step, and the busiest one alone. Memory: of a device, at the peak of a "
    "step. Binds: what an exchange spends most of its time on."
)


def show_plan(found: Plan, *, as_json: bool, plot: Path | None) -> None:
    if plot:
        draw(found, plot)
    if as_json:
        print_json(found.as_json())
        return
    print_table(HEADERS, _rows(found), note=LEGEND)
    print(f"\n{describe(found)}")
    for curve in found.curves:
        print(f"\n{curve.kind.capitalize()} scaling, {curve.name}:")
        print_table(["Nodes", "Workers", "Images", "Step (s)", "Exposed (s)", "%"], _points(curve))
    if found.curves:
        print()
        for curve in found.curves:
            print(curve.explain())
        print("Beyond what was measured these are predictions, and nothing else.")
    print(f"\nTake {found.why}")


def describe(found: Plan) -> str:
    """What the figures rest on."""
    subject, cluster = found.subject, found.cluster
    compute = subject.compute.of(subject.config.train.batch / cluster.workers)
    how = (
        f"measured here with {subject.compute.images} images and scaled"
        if subject.measured
        else "as given"
    )
    lines = [
        f"{found.recipe} on {cluster.nodes:,} x {cluster.devices} workers, {compute.images:,} "
        f"images each, {subject.gradient.values:,} parameters.",
        f"Without an exchange a worker takes {compute.total:.3g} s a step ({how}).",
        f"Kernels and messages: {told_origin(found.costs)}",
    ]
    return "\n".join(lines)


def told_origin(costs: Costs) -> str:
    if costs.origin != BUILT_IN:
        return f"{costs.origin}."
    rows = ", ".join(f"{name} {figure}" for name, figure in costs.describe())
    return (
        f"built-in figures, not this machine's ({rows}); dat plan --calibrate measures those of "
        "this machine."
    )


def show_costs(costs: Costs, path: Path, *, as_json: bool) -> None:
    if as_json:
        print_json(vars(costs))
        return
    print_table(["What", "Costs"], [list(row) for row in costs.describe()])
    print(f"\n{costs.origin}; kept in {path}")


def _rows(found: Plan) -> list[list[str]]:
    rows = []
    for it in found.alternatives:
        step = it.step
        seconds = (step.step, step.exposed, step.communication)
        rows.append(
            [
                step.protocol,
                str(step.bits),
                *(f"{value:.3f}" for value in seconds),
                f"{it.epoch:.1f}",
                f"{it.steps * step.communication:.1f}",
                f"{step.sent / 1e6:.1f}",
                f"{step.busiest / 1e6:.1f}",
                f"{it.memory.total / 1e6:,.0f}",
                step.binds,
            ]
        )
    return rows


def _points(curve: Curve) -> list[list[str]]:
    return [
        [
            f"{it.nodes:,}",
            f"{it.workers:,}",
            f"{it.share:.4g}",
            f"{it.found.step.step:.3f}",
            f"{it.found.step.exposed:.3f}",
            f"{100 * it.efficiency:.0f}",
        ]
        for it in curve.points
    ]


def draw(found: Plan, path: Path) -> None:
    """Efficiency over workers, if nodes were swept over; else a step's seconds over bits."""
    title = f"{found.recipe}, predicted"
    if found.curves:
        charts = [
            Chart(_lines(found.curves, kind), "workers", f"% of ideal, {kind} scaling", True)
            for kind in dict.fromkeys(curve.kind for curve in found.curves)
        ]
    else:
        lines: dict[str, tuple[list[float], list[float]]] = {}
        for it in found.alternatives:
            xs, ys = lines.setdefault(it.step.protocol, ([], []))
            xs.append(it.step.bits)
            ys.append(it.step.step)
        charts = [Chart(lines, "bits", "seconds a step", True)]
    line_charts(path, charts, title=title)


def _lines(curves: Sequence[Curve], kind: str) -> dict[str, tuple[list[float], list[float]]]:
    return {
        curve.name: (
            [float(it.workers) for it in curve.points],
            [100 * it.efficiency for it in curve.points],
        )
        for curve in curves
        if curve.kind == kind
    }
