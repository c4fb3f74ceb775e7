"""One page for one or several runs: a file that opens anywhere and loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from dat.files import write_whole
from dat.report.page import figures, svg, tables
from dat.report.page.figures import Figure
from dat.report.page.gather import Told, gather
from dat.report.page.tables import NONE, Table
from dat.report.plots import Chart, Stack, heat_map, line_charts, stacked_bars

TABLES = (
    *("tiles", "comparison", "classes", "confusions", "gallery", "communication", "settings"),
    "surroundings",
)
CHARTS = ("training", "curves", "certified")
"""What the template calls."""


def write_page(runs: Sequence[Path], out: Path) -> None:
    """Read the runs' folders, and write the page about them."""
    write_whole(out, render(gather(runs)).encode())


def write_plots(runs: Sequence[Path], folder: Path) -> list[Path]:
    """The page's charts as files, each as PNG and as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    told, written = gather(runs), []
    for figure in charts(told):
        for suffix in (".png", ".svg"):
            path = folder / f"{figure.name}{suffix}"
            _plot(figure, path)
            written.append(path)
    return written


def charts(runs: Sequence[Told]) -> list[Figure]:
    """All of the page."""
    return [*figures.training(runs), *figures.curves(runs), *figures.certified(runs)]


def render(runs: Sequence[Told]) -> str:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    from dat import __version__

    def draw(figure: Figure) -> Markup:
        return Markup(_draw(figure))

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.globals |= {name: getattr(tables, name) for name in TABLES}
    environment.globals |= {name: getattr(figures, name) for name in CHARTS}
    here = files(__package__)
    page = environment.from_string((here / "page.html").read_text())
    return page.render(
        title=" · ".join(run.name for run in runs),
        lead=_lead(runs),
        runs=runs,
        warnings=_warnings(runs),
        sections=_sections(runs),
        style=Markup((here / "style.css").read_text()),
        draw=draw,
        legend=_legend,
        numbers=numbers,
        version=__version__,
        command=f"dat report {' '.join(str(run.path) for run in runs)}",
    )


def _lead(runs: Sequence[Told]) -> str:
    """What was trained, in a line."""
    found = []
    for run in runs:
        config, result = run.config, run.result or {}
        threat = config.get("threat", {})
        workers = run.environment.get("workers", 1)
        found.append(
            f"{result.get('method', 'training')}: {config['model']['name']} on "
            f"{Path(str(config['data']['name'])).name}, {threat.get('norm')} eps "
            f"{float(threat.get('eps', 0)):.4g}, {workers} worker{'s' * (workers != 1)}"
        )
    return "; ".join(dict.fromkeys(found))


def _warnings(runs: Sequence[Told]) -> list[str]:
    if len(runs) == 1:
        return runs[0].warnings
    return [f"{run.name}: {text}" for run in runs for text in run.warnings]


def _sections(runs: Sequence[Told]) -> list[tuple[str, str]]:
    found = [("figures", "Figures"), ("training", "Training")]
    if figures.curves(runs) or figures.certified(runs):
        found.append(("robustness", "Robustness"))
    examined = [run for run in runs if run.examined]
    for number, run in enumerate(examined, 1):
        name = f": {run.name}" if len(runs) > 1 else ""
        found.append((f"look-{number}", f"A closer look{name}"))
    if tables.communication(runs):
        found.append(("communication", "Communication"))
    return [*found, ("settings", "Settings and environment")]


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
    """What a chart shows, for those who read rather than look."""
    chart = figure.chart
    if isinstance(chart, Chart):
        lines: dict[str, Any] = {
            name: dict(zip(*line, strict=True)) for name, line in chart.lines.items()
        }
        x_axis, places = chart.x_axis, sorted({x for it in lines.values() for x in it})
        headers = [name or chart.y_axis for name in lines]
    else:
        places = list(chart.x if isinstance(chart, Stack) else chart.columns)
        rows = chart.parts if isinstance(chart, Stack) else chart.rows
        lines = {name: dict(zip(places, it, strict=True)) for name, it in rows.items()}
        x_axis, headers = chart.x_axis, list(lines)
    cells = [
        [svg.label(x), *(f"{it[x]:.4g}" if x in it else NONE for it in lines.values())]
        for x in places
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
