"""Write the page: a single HTML file that loads nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from dat.core.files import atomic_write
from dat.core.glossary import legend
from dat.core.threat import show_radius
from dat.report.page import figures, svg, tables
from dat.report.page.figures import Figure
from dat.report.page.gather import RunRecord, gather
from dat.report.page.tables import NONE, Table
from dat.report.plots import Chart, Stack, heat_map, line_charts, stacked_bars

TABLES = (
    *("tiles", "comparison", "classes", "confusions", "gallery", "communication", "settings"),
    "environment",
)
CHARTS = ("training", "curves", "certified")
"""Functions that the template calls."""


def write_page(runs: Sequence[Path], out: Path) -> None:
    """Read the folders of runs and write the page about them."""
    atomic_write(out, render(gather(runs)).encode())


def write_plots(runs: Sequence[Path], folder: Path) -> list[Path]:
    """The page's charts as files, each as PNG and SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for figure in charts(gather(runs)):
        for suffix in (".png", ".svg"):
            path = folder / f"{figure.name}{suffix}"
            _plot(figure, path)
            written.append(path)
    return written


def charts(runs: Sequence[RunRecord]) -> list[Figure]:
    """All charts of the page."""
    return [*figures.training(runs), *figures.curves(runs), *figures.certified(runs)]


def render(runs: Sequence[RunRecord]) -> str:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    from dat import __version__

    def draw(figure: Figure) -> Markup:
        return Markup(_draw(figure))

    jinja = Environment(autoescape=True, undefined=StrictUndefined)
    jinja.globals |= {name: getattr(tables, name) for name in TABLES}
    jinja.globals |= {name: getattr(figures, name) for name in CHARTS}
    here = files(__package__)
    page = jinja.from_string((here / "page.html").read_text())
    return page.render(
        title=" · ".join(run.name for run in runs),
        lead=_lead(runs),
        runs=runs,
        warnings=_warnings(runs),
        sections=_sections(runs),
        style=Markup((here / "style.css").read_text()),
        draw=draw,
        legend=_legend,
        spelled_out=legend,
        numbers=numbers,
        version=__version__,
        command=f"dat report {' '.join(str(run.path) for run in runs)}",
    )


def _lead(runs: Sequence[RunRecord]) -> str:
    """What was trained, in one line."""
    descriptions = []
    for run in runs:
        config, result = run.config, run.result or {}
        threat = config.get("threat", {})
        workers = run.environment.get("workers", 1)
        descriptions.append(
            f"{result.get('method', 'training')}: {config['model']['name']} on "
            f"{Path(str(config['data']['name'])).name}, {threat.get('norm')} eps "
            f"{show_radius(float(threat.get('eps', 0)))}, {workers} worker{'s' * (workers != 1)}"
        )
    return "; ".join(dict.fromkeys(descriptions))


def _warnings(runs: Sequence[RunRecord]) -> list[str]:
    if len(runs) == 1:
        return runs[0].warnings
    return [f"{run.name}: {text}" for run in runs for text in run.warnings]


def _sections(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    sections = [("figures", "Figures"), ("training", "Training")]
    if figures.curves(runs) or figures.certified(runs):
        sections.append(("robustness", "Robustness"))
    analysed = [run for run in runs if run.examined]
    for number, run in enumerate(analysed, 1):
        name = f": {run.name}" if len(runs) > 1 else ""
        sections.append((f"errors-{number}", f"Error analysis{name}"))
    if tables.communication(runs):
        sections.append(("communication", "Communication"))
    return [*sections, ("settings", "Settings and environment")]


def _draw(figure: Figure) -> str:
    chart, name = figure.chart, f"chart-{figure.name}"
    if isinstance(chart, Chart):
        return svg.line_chart(chart, name)
    return svg.stacked_chart(chart, name) if isinstance(chart, Stack) else svg.heat_map(chart, name)


def _legend(figure: Figure) -> list[tuple[str, str]]:
    chart = figure.chart
    if isinstance(chart, Chart):
        return svg.legend(chart.lines)
    return svg.legend(chart.parts, dashed=False) if isinstance(chart, Stack) else []


def numbers(figure: Figure) -> Table:
    """The values of a chart as a table."""
    chart = figure.chart
    if isinstance(chart, Chart):
        lines: dict[str, Any] = {
            name: dict(zip(*line, strict=True)) for name, line in chart.lines.items()
        }
        x_axis, xs = chart.x_axis, sorted({x for values in lines.values() for x in values})
        headers = [name or chart.y_axis for name in lines]
    else:
        xs = list(chart.x if isinstance(chart, Stack) else chart.columns)
        rows = chart.parts if isinstance(chart, Stack) else chart.rows
        lines = {name: dict(zip(xs, values, strict=True)) for name, values in rows.items()}
        x_axis, headers = chart.x_axis, list(lines)
    cells = [
        [svg.label(x), *(f"{values[x]:.4g}" if x in values else NONE for values in lines.values())]
        for x in xs
    ]
    return Table(figure.title, [x_axis, *headers], cells)


def _plot(figure: Figure, path: Path) -> None:
    chart = figure.chart
    if isinstance(chart, Chart):
        line_charts(path, [chart], title=figure.title)
    elif isinstance(chart, Stack):
        stacked_bars(path, chart)
    else:
        heat_map(path, chart)
