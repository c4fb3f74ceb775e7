"""The plot of a study. Its kind is `plot.kind` in the study's file:

lines    columns `y` over the label `x`, one line per `series`
bars     columns `y`, one group of bars per row
curves   metrics `y` over the epochs, one line per row (the first seed)
sweep    RA over eps and over the attack's steps
radii    certified accuracy over the radius
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dat.report.plots import Chart, bar_chart, line_charts
from dat.tools.reproduce.figures import column, estimate, values_of

Rows = Sequence[dict[str, Any]]


def draw(path: Path, title: str, rows: Rows, plot: dict[str, Any], columns: Sequence[str]) -> None:
    KINDS[plot.get("kind", "bars")](
        path, title, [row for row in rows if row["shown"]], plot, columns
    )


def _mean(row: dict[str, Any], name: str) -> float:
    values = values_of(row, column(name).key)
    return estimate(values).mean if values else float("nan")


def _lines(
    path: Path, title: str, rows: Rows, plot: dict[str, Any], columns: Sequence[str]
) -> None:
    charts = []
    for name in plot["y"]:
        lines: dict[str, tuple[list[float], list[float]]] = {}
        spreads: dict[str, list[float]] = {}
        for row in rows:
            series = str(row["labels"].get(plot.get("series", ""), ""))
            xs, ys = lines.setdefault(series, ([], []))
            values = values_of(row, column(name).key)
            if values:
                mean, spread = estimate(values)
                xs.append(float(row["labels"][plot["x"]]))
                ys.append(mean)
                spreads.setdefault(series, []).append(spread or 0.0)
        charts.append(
            Chart(
                lines,
                plot.get("axis", plot["x"]),
                column(name).header,
                logarithmic=plot.get("log", False),
                from_zero=False,
                spreads=spreads,
            )
        )
    line_charts(path, charts, title=title)


def _bars(path: Path, title: str, rows: Rows, plot: dict[str, Any], columns: Sequence[str]) -> None:
    names = plot.get("y", [name for name in columns if name in ("TA", "RA", "AA")])
    series = {
        name: [_mean(row, name) for row in rows]
        for name in names
        if any(values_of(row, column(name).key) for row in rows)
    }
    bar_chart(path, [row["name"] for row in rows], series, title=title, axis="%")


def _curves(path: Path, title: str, rows: Rows, plot: dict[str, Any], _: Sequence[str]) -> None:
    charts = []
    for key, axis in plot["y"].items():
        lines = {}
        for row in rows:
            epochs = [e for e in row["runs"][0]["epochs_told"] if e.get(key) is not None]
            lines[row["name"]] = [e["epoch"] for e in epochs], [e[key] for e in epochs]
        charts.append(Chart(lines, "epoch", axis, from_zero=False))
    line_charts(path, charts, title=title)


def _sweep(path: Path, title: str, rows: Rows, plot: dict[str, Any], _: Sequence[str]) -> None:
    charts = []
    for number, axis in ((0, "eps"), (1, "steps of the attack")):
        lines = {}
        for row in rows:
            curves = [run["curves"][number] for run in row["runs"] if run.get("curves")]
            if curves:
                means = [
                    estimate(points).mean for points in zip(*(c["ra"] for c in curves), strict=True)
                ]
                lines[row["name"]] = list(curves[0]["values"]), means
        charts.append(Chart(lines, axis, "RA (%)", logarithmic=number == 1))
    line_charts(path, charts, title=title)


def _radii(
    path: Path, title: str, rows: Rows, plot: dict[str, Any], columns: Sequence[str]
) -> None:
    radii = [name for name in columns if name.startswith("r=")]
    lines = {
        row["name"]: ([float(name[2:]) for name in radii], [_mean(row, name) for name in radii])
        for row in rows
    }
    line_charts(path, [Chart(lines, "radius", "certified accuracy (%)")], title=title)


KINDS: dict[str, Callable[..., None]] = {
    "lines": _lines,
    "bars": _bars,
    "curves": _curves,
    "sweep": _sweep,
    "radii": _radii,
}
