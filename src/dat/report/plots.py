"""Plots of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

FORMATS = (".png", ".svg", ".pdf")


class Chart(NamedTuple):
    """Lines over an axis."""

    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    x_axis: str
    y_axis: str
    logarithmic: bool = False
    from_zero: bool = True
    spreads: Mapping[str, Sequence[float]] = {}
    """Half-widths of the error bars, for some of the lines."""
    both_logarithmic: bool = False


class Stack(NamedTuple):
    """Stacked bars."""

    x: Sequence[float]
    parts: Mapping[str, Sequence[float]]
    x_axis: str
    y_axis: str


class Heat(NamedTuple):
    """Positive values in rows and columns."""

    columns: Sequence[float]
    rows: Mapping[str, Sequence[float]]
    x_axis: str
    meaning: str


def check_picture(path: Path) -> None:
    """Raise if a plot cannot be written to this file, before any work is done."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{path}: a plot is written to a file that ends in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: folder {path.parent} does not exist")


def bar_chart(
    path: Path,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    title: str,
    axis: str,
    spread: Sequence[tuple[float, float]] = (),
    limits: Sequence[float] = (),
) -> None:
    """Horizontal bars, one group per label, with the value at the end of each bar.

    With one series, `spread` gives the range of each value, and `limits` the best possible values.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    height = 0.8 / len(series)
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.3 * len(labels) * len(series)))
    for number, (name, values) in enumerate(series.items()):
        shift = (number - (len(series) - 1) / 2) * height
        bars = axes.barh([y + shift for y in range(len(labels))], values, height, label=name)
        axes.bar_label(bars, fmt="%.3g", padding=3)
    positions = range(len(labels))
    if spread:
        axes.hlines(positions, *zip(*spread, strict=True), color="black", linewidth=1)
    if limits:
        ends = zip(*((y - 0.4, y + 0.4) for y in positions), strict=True)
        axes.vlines(limits, *ends, color="gray")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel(axis)
    axes.set_title(title, pad=26 if len(series) > 1 else None)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    if len(series) > 1:
        axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(series))
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def stacked_bars(path: Path, stack: Stack) -> None:
    """One bar per value of x."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5.5, 4))
    below = [0.0] * len(stack.x)
    for name, values in stack.parts.items():
        axes.bar(stack.x, values, bottom=below, label=name)
        below = [low + value for low, value in zip(below, values, strict=True)]
    axes.set_xlabel(stack.x_axis)
    axes.set_ylabel(stack.y_axis)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def heat_map(path: Path, heat: Heat) -> None:
    """One row per name, on a logarithmic scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import LogNorm

    figure, axes = plt.subplots(figsize=(7, 1.5 + 0.2 * len(heat.rows)))
    values = [[max(value, 1e-30) for value in row] for row in heat.rows.values()]
    image = axes.imshow(values, aspect="auto", norm=LogNorm(), cmap="Blues")
    axes.set_yticks(range(len(heat.rows)), list(heat.rows), fontsize=7)
    ticks = sorted({0, len(heat.columns) // 2, len(heat.columns) - 1})
    axes.set_xticks(ticks, [f"{heat.columns[tick]:g}" for tick in ticks])
    axes.set_xlabel(heat.x_axis)
    figure.colorbar(image, label=heat.meaning)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def line_charts(path: Path, charts: Sequence[Chart], *, title: str = "") -> None:
    """Charts side by side, each with one line per name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, row = plt.subplots(1, len(charts), figsize=(5.5 * len(charts), 4), squeeze=False)
    for axes, chart in zip(row[0], charts, strict=True):
        for name, (x, y) in chart.lines.items():
            axes.errorbar(
                x, y, chart.spreads.get(name), marker="o", markersize=4, capsize=3, label=name
            )
        axes.set_xlabel(chart.x_axis)
        axes.set_ylabel(chart.y_axis)
        if chart.from_zero:
            axes.set_ylim(bottom=0)
        if chart.y_axis.endswith("(%)"):  # error bars may exceed the range, values cannot
            low, high = axes.get_ylim()
            axes.set_ylim(max(low, -2), min(high, 102))
        if chart.logarithmic or chart.both_logarithmic:
            axes.set_xscale("log")
        elif all(float(x).is_integer() for xs, _ in chart.lines.values() for x in xs):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # no epoch 1.25
        if chart.both_logarithmic:
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if any(chart.lines):
            axes.legend(frameon=False)
    if title:
        figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
