"""SVG charts for the page, which take their colors from its light or dark style."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from dat.report.plots import Chart, Heat, Stack

WIDTH, HEIGHT = 440, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 24, 40
MARKED = 60
"""Maximum number of points on a line that get markers."""
COLORS = 8


class Axis(NamedTuple):
    """Maps values to coordinates."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        scale: Callable[[float], float] = math.log10 if self.logarithmic else float
        low, high = scale(self.low), scale(self.high)
        share = (scale(value) - low) / (high - low) if high > low else 0.5
        return round(self.start + share * (self.end - self.start), 2)

    def ticks(self) -> list[float]:
        return decades(self.low, self.high) if self.logarithmic else nice(self.low, self.high)


def nice(low: float, high: float, most: int = 6) -> list[float]:
    """Evenly spaced round values in a range, about `most` of them."""
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
        return [low]
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    factors = (1, 2, 2.5, 5, 10)
    step = next(f * power for f in factors if f * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def decades(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... in a small range, powers of ten in a large one."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if high / low <= 1e3 else (1,)
    values = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    ticks = [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
    return ticks[:: -(-len(ticks) // 7)] if ticks else [low]


def label(value: float) -> str:
    """Format a number for an axis."""
    return f"{value:.4g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.0e}"


def line_chart(chart: Chart, name: str) -> str:
    """Lines over an axis, with a tooltip on every point; `name` is unique on the page."""
    points = [point for xs, ys in chart.lines.values() for point in zip(xs, ys, strict=True)]
    points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    x_log = chart.logarithmic or chart.both_logarithmic
    xs, ys = _range([x for x, _ in points], log=x_log), _range([y for _, y in points])
    if chart.from_zero:
        ys = min(0.0, ys[0]), ys[1]
    across = Axis(*xs, LEFT, WIDTH - RIGHT, x_log)
    up = Axis(*ys, HEIGHT - BOTTOM, TOP, chart.both_logarithmic)
    drawn = [
        _line(number, line_name, line, across, up)
        for number, (line_name, line) in enumerate(chart.lines.items())
    ]
    return _frame(name, chart.x_axis, chart.y_axis, across, up, drawn)


def stacked_chart(stack: Stack, name: str) -> str:
    """Stacked bars, one per value of x."""
    totals = [sum(parts) for parts in zip(*stack.parts.values(), strict=True)]
    gap = (WIDTH - LEFT - RIGHT) / max(len(stack.x), 1)
    step = stack.x[1] - stack.x[0] if len(stack.x) > 1 else 1.0
    across = Axis(stack.x[0] - step / 2, stack.x[-1] + step / 2, LEFT, WIDTH - RIGHT)
    up = Axis(0.0, max(totals, default=0.0) or 1.0, HEIGHT - BOTTOM, TOP)
    drawn, below = [], [0.0] * len(totals)
    for number, (part, values) in enumerate(stack.parts.items()):
        for index, value in enumerate(values):
            top, foot = up(below[index] + value), up(below[index])
            below[index] += value
            x = across(stack.x[index]) - 0.4 * gap
            tooltip = f"{part}, {stack.x_axis} {label(stack.x[index])}: {label(value)}"
            drawn.append(
                f'<rect class="area c{number % COLORS}" x="{x:.2f}" y="{top}" '
                f'width="{0.8 * gap:.2f}" height="{foot - top:.2f}">{_title(tooltip)}</rect>'
            )
    return _frame(name, stack.x_axis, stack.y_axis, across, up, drawn)


def heat_map(heat: Heat, name: str) -> str:
    """One row per layer, one column per epoch; darker is larger, on a logarithmic scale."""
    row, margin, width = 16, 150, WIDTH
    height = TOP + row * len(heat.rows) + BOTTOM
    cell = (width - margin - RIGHT) / max(len(heat.columns), 1)
    logs = [math.log10(v) for values in heat.rows.values() for v in values if v > 0]
    low, high = min(logs, default=0.0), max(logs, default=1.0)
    drawn = []
    for number, (row_name, values) in enumerate(heat.rows.items()):
        y = TOP + row * number
        shown = row_name if len(row_name) <= 24 else f"…{row_name[-23:]}"
        drawn.append(f'<text class="end" x="{margin - 6}" y="{y + 12}">{escape(shown)}</text>')
        for index, value in enumerate(values):
            share = (math.log10(value) - low) / (high - low or 1.0) if value > 0 else 0.0
            tooltip = f"{row_name}, {heat.x_axis} {label(heat.columns[index])}: {value:.3g}"
            drawn.append(
                f'<rect class="area c0" x="{margin + index * cell:.2f}" y="{y}" '
                f'width="{cell:.2f}" height="{row - 1}" fill-opacity="{0.08 + 0.92 * share:.3f}">'
                f"{_title(tooltip)}</rect>"
            )
    for value in nice(heat.columns[0], heat.columns[-1]) if heat.columns else ():
        if value in heat.columns:
            x = margin + (heat.columns.index(value) + 0.5) * cell
            drawn.append(f'<text class="mid" x="{x:.2f}" y="{height - 24}">{label(value)}</text>')
    drawn.append(
        f'<text class="mid" x="{(margin + width - RIGHT) / 2}" y="{height - 6}">'
        f"{escape(heat.x_axis)}</text>"
    )
    return _svg(name, f"{heat.meaning} over {heat.x_axis}", drawn, (width, height))


def _range(values: Sequence[float], *, log: bool = False) -> tuple[float, float]:
    """Slightly more than the range of the values, so that no point lies on the edge."""
    valid = [value for value in values if value > 0] if log else list(values)
    if not valid:
        return (1.0, 10.0) if log else (0.0, 1.0)
    low, high = min(valid), max(valid)
    if log:
        return low / 1.1, high * 1.1
    margin = 0.04 * (high - low) or abs(high) * 0.1 or 0.5
    return low - margin, high + margin


def _line(
    number: int, name: str, line: tuple[Sequence[float], Sequence[float]], across: Axis, up: Axis
) -> str:
    points = [
        (x, y)
        for x, y in zip(*line, strict=True)
        if math.isfinite(y) and (x > 0 or not across.logarithmic)
    ]
    coordinates = [f"{across(x)},{up(y)}" for x, y in points]
    color = f"c{number % COLORS}"
    drawn = f'<polyline class="line {color} d{number % 4}" points="{" ".join(coordinates)}"/>'
    for x, y in points if len(points) <= MARKED else ():
        tooltip = f"{name + ': ' if name else ''}{label(x)}, {label(y)}"
        drawn += (
            f'<circle class="area {color}" cx="{across(x)}" cy="{up(y)}" r="3">'
            f"{_title(tooltip)}</circle>"
        )
    return drawn


def _frame(
    name: str, x_axis: str, y_axis: str, across: Axis, up: Axis, drawn: Sequence[str]
) -> str:
    """Add grid, axes and labels to what is drawn."""
    right, foot = WIDTH - RIGHT, HEIGHT - BOTTOM
    grid = []
    for value in up.ticks():
        y = up(value)
        grid.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
        grid.append(f'<text class="end" x="{LEFT - 6}" y="{y + 4}">{label(value)}</text>')
    for value in across.ticks():
        x = across(value)
        grid.append(f'<text class="mid" x="{x}" y="{foot + 16}">{label(value)}</text>')
    grid.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{foot}" y2="{foot}"/>')
    middle = (LEFT + right) / 2
    grid.append(f'<text class="mid" x="{middle}" y="{HEIGHT - 6}">{escape(x_axis)}</text>')
    grid.append(f'<text x="{LEFT}" y="12">{escape(y_axis)}</text>')
    return _svg(name, f"{y_axis} over {x_axis}", [*grid, *drawn], (WIDTH, HEIGHT))


def _svg(name: str, title: str, drawn: Sequence[str], size: tuple[float, float]) -> str:
    return (
        f'<svg role="img" aria-labelledby="{name}-title" viewBox="0 0 {size[0]} {size[1]}">'
        f'<title id="{name}-title">{escape(title)}</title>'
        f"{''.join(drawn)}</svg>"
    )


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def legend(names: Mapping[str, object], *, dashed: bool = True) -> list[tuple[str, str]]:
    """Each line's name with its CSS classes."""
    return [
        (f"c{number % COLORS} d{number % 4 if dashed else 0}", name)
        for number, name in enumerate(names)
        if name
    ]
