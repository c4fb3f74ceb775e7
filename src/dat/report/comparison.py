"""Runs side by side: their results, and the settings in which they differ."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console

from dat.core.glossary import legend
from dat.core.threat import show_radius
from dat.report.tables import print_table, run_columns, show_cell

WIDTH, GAP = 80, 2
"""Width of a table outside a wide terminal, and the spaces between its columns."""
SETTINGS_FIRST, NAME, VALUE = 2, 24, 16
"""Settings that have priority over times and traffic; widths of a run's name and of a setting."""
BY_THREAT = {"ra": "RA", "aa": "AA", "ema_ra": "EMA RA"}
ALREADY_SHOWN = {"batch": "train.batch", "bits": "quantizer.bits", "protocol": "protocol.name"}
"""Entries of a result that are settings."""
NOT_COMPARED = ("about", "recipe")
MOST_TELLING = (
    *("data.name", "model.name", "threat", "attack", "objective", "optimizer", "train.epochs"),
    *("train.batch", "schedule", "train", "quantizer", "protocol", "model", "seed", "data"),
    *("finetune", "evaluate.attacks", "evaluate", "compute", "comm"),
)
MAIN = MOST_TELLING.index("schedule")
"""Up to here, settings may have priority."""
ABSENT = "-"


class ComparedRun(NamedTuple):
    """A run, finished or not."""

    name: str
    settings: Mapping[str, Any]
    """By path, such as `attack.steps`."""
    result: dict[str, Any] | None
    """None until the run is finished."""
    epoch: int
    """Completed epochs."""

    @property
    def status(self) -> str:
        if self.result is not None:
            return "finished"
        return f"epoch {self.epoch} of {self.settings['train.epochs']}"

    @property
    def threat(self) -> tuple[str, str, str]:
        """The attack of RA, the norm and eps."""
        attack = str((self.result or {}).get("attack", "")).rpartition(", ")[0]
        return attack, self.settings["threat.norm"], show_radius(self.settings["threat.eps"])


class Column(NamedTuple):
    header: str
    cells: Sequence[str]
    path: str = ""
    """Of a setting."""

    @property
    def width(self) -> int:
        return max(map(len, (self.header, *self.cells)))


def show_comparison_of_runs(runs: Sequence[ComparedRun]) -> None:
    """A table of as many columns as fit; the other settings that differ are listed below it."""
    console = Console()
    width = max(WIDTH, console.width) if console.is_terminal else WIDTH
    accuracies, costs = _results(runs)
    settings = differing_settings(runs)
    needed = [Column("Run", _short([run.name for run in runs]))]
    if any(run.result is None for run in runs):
        needed.append(Column("Status", [run.status for run in runs]))
    main = [column for column in settings if _rank(column.path)[0] < MAIN][:SETTINGS_FIRST]
    main = main or list(settings[:1])
    order = [*main, *costs, *(column for column in settings if column not in main)]
    shown = _fitting([*needed, *accuracies], order, width)
    columns = [*needed, *(c for c in settings if c in shown), *accuracies]
    columns += [column for column in costs if column in shown]
    rows = list(map(list, zip(*(column.cells for column in columns), strict=True)))
    print_table([column.header for column in columns], rows)
    for line in _notes(runs, columns, [column for column in order if column not in shown]):
        print("\n" + textwrap.fill(line, width, break_on_hyphens=False))


def _fitting(needed: Sequence[Column], order: Sequence[Column], width: int) -> list[Column]:
    """The columns that fit beside those needed, in this order of priority."""
    left, shown = width + GAP - sum(column.width + GAP for column in needed), list[Column]()
    for column in order:
        if column.width + GAP <= left:
            left -= column.width + GAP
            shown.append(column)
    return shown


def _notes(
    runs: Sequence[ComparedRun], columns: Sequence[Column], hidden: Sequence[Column]
) -> list[str]:
    attacks = dict.fromkeys(
        "{}, {} {}".format(*run.threat) for run in runs if run.result and run.threat[0]
    )
    headers = [column.header for column in columns if not column.path]
    details = {"RA": " and ".join(attacks)} if attacks else {}
    notes = [f"{legend(headers, **details)} Accuracies in %."]
    named = [f"{c.header}: {c.path}" for c in columns if c.path and c.header != c.path]
    notes += [f"Settings that differ: {'; '.join(named)}."] if named else []
    settings = [f"{c.path} ({', '.join(dict.fromkeys(c.cells))})" for c in hidden if c.path]
    notes += [f"Also different: {'; '.join(settings)}."] if settings else []
    left_out = [column.header for column in hidden if not column.path]
    if left_out:
        notes.append(f"Not shown for lack of width: {', '.join(left_out)} (--json has all).")
    return notes


def _results(runs: Sequence[ComparedRun]) -> tuple[list[Column], list[Column]]:
    """The accuracies, one column per threat; and the other results, most important first."""
    results = [run.result or {} for run in runs]
    headers = run_columns(results)
    differing = {column.path for column in differing_settings(runs)}
    accuracies, costs = list[Column](), list[Column]()
    for key, header in headers.items():
        if key in BY_THREAT:
            accuracies += _by_threat(runs, key)
        elif ALREADY_SHOWN.get(key) not in differing:
            cells = [show_cell(key, result.get(key)) for result in results]
            column = Column(header.removesuffix(" (%)"), cells)
            (accuracies if key in ("ta", "ema_ta") else costs).append(column)
    return accuracies, costs


def _by_threat(runs: Sequence[ComparedRun], key: str) -> list[Column]:
    """The accuracy under attack in one column per attack and threat, named by what differs."""
    measured = [run for run in runs if run.result and run.result.get(key) is not None]
    threats = list(dict.fromkeys(_threat(run, key) for run in measured))
    varied = [len(set(parts)) > 1 for parts in zip(*threats, strict=True)]
    columns = []
    for threat in threats:
        name = [part for part, differs in zip(threat, varied, strict=True) if differs]
        cells = [
            show_cell(key, run.result.get(key))
            if run.result and _threat(run, key) == threat
            else ABSENT
            for run in runs
        ]
        columns.append(Column(" ".join([BY_THREAT[key], *name]), cells))
    return columns or [Column(BY_THREAT[key], [ABSENT] * len(runs))]


def _threat(run: ComparedRun, key: str) -> tuple[str, str, str]:
    attack, norm, eps = run.threat
    return "" if key == "aa" else attack, norm, eps


def differing_settings(runs: Sequence[ComparedRun]) -> list[Column]:
    """The settings in which the runs differ, the most telling first. The settings that only one
    component has follow from its name."""
    columns = []
    for path in dict.fromkeys(path for run in runs for path in run.settings):
        values = {str(run.settings[path]) for run in runs if path in run.settings}
        if len(values) > 1 and path not in NOT_COMPARED:
            columns.append(Column(path, [_value(path, run.settings) for run in runs], path))
    return _short_headers(sorted(columns, key=lambda column: _rank(column.path)))


def _rank(path: str) -> tuple[int, bool]:
    starts = enumerate(MOST_TELLING)
    ranks = [rank for rank, start in starts if f"{path}.".startswith(f"{start}.")]
    return min(ranks, default=len(MOST_TELLING)), not path.endswith(".name")


def _short_headers(columns: Sequence[Column]) -> list[Column]:
    """`lr` for `optimizer.lr` and `attack` for `attack.name`, where no other setting has it."""
    short = [c.path.removesuffix(".name").rpartition(".")[2] for c in columns]
    return [
        column._replace(header=name) if short.count(name) == 1 else column
        for column, name in zip(columns, short, strict=True)
    ]


def _value(path: str, settings: Mapping[str, Any]) -> str:
    value = settings.get(path, ABSENT)
    if isinstance(value, float):
        return show_radius(value) if path.endswith("eps") else f"{value:g}"
    if isinstance(value, list):
        text = ",".join(map(str, value)) or "none"
    else:
        text = "none" if value is None else str(value).rstrip("/").rpartition("/")[2]
    return _cut(text, VALUE)


def _short(names: Sequence[str]) -> list[str]:
    """Names that are not too long, if they still differ."""
    short = [_cut(name, NAME) for name in names]
    return short if len(set(short)) == len(set(names)) else list(names)


def _cut(text: str, width: int) -> str:
    """At most so many characters, of the beginning and of the end."""
    half = (width - 1) // 2
    return text if len(text) <= width else f"{text[:half]}…{text[half - width + 1 :]}"
