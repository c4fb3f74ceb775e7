"""What came out of a study: figures by row and seed, and the table in the paper's form."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from scipy import stats

from dat.reproduce.runs import Plan, Run
from dat.reproduce.study import Row


class Column(NamedTuple):
    key: str
    header: str
    digits: int


COLUMNS = {
    "TA": Column("ta", "TA (%)", 1),
    "RA": Column("ra", "RA (%)", 1),
    "AA": Column("aa", "AA (%)", 1),
    "C": Column("comm_seconds_per_epoch", "C (s)", 2),
    "T": Column("train_seconds_per_epoch", "T (s)", 1),
    "MB": Column("mb_per_step", "MB/it", 2),
    "steps": Column("steps", "steps", 0),
    "TA of EMA": Column("ema_ta", "TA of EMA (%)", 1),
    "RA of EMA": Column("ema_ra", "RA of EMA (%)", 1),
}
KEPT = (
    *("ta", "ra", "steps", "batch", "workers", "epochs", "best_epoch", "holdout_ta", "holdout_ra"),
    *("comm_seconds_per_epoch", "exposed_seconds_per_epoch", "train_seconds_per_epoch"),
    *("train_seconds", "mb_per_step", "mb_per_epoch", "diverged", "warnings", "attack", "images"),
    *("ema_ta", "ema_ra"),
)
"""Of a run's result, what is written down."""


def column(name: str) -> Column:
    """Of the table; `r=0.1` is the certified accuracy at a radius."""
    if name.startswith("r="):
        return Column(name, f"{name} (%)", 1)
    return COLUMNS[name]


def collect(plan: Plan) -> list[dict[str, Any]]:
    """Every row with its runs and their figures."""
    return [_row(plan, row) for row in plan.study.rows]


def _row(plan: Plan, row: Row) -> dict[str, Any]:
    runs = [plan.run(row, seed) for seed in range(plan.seeds)]
    found: dict[str, Any] = {
        "name": row.name,
        "shown": row.shown,
        "workers": row.workers,
        "labels": row.labels,
        "paper": row.paper,
        "runs": [_figures(plan, run) for run in runs],
    }
    timing = plan.timing(row) if plan.study.timed and row.shown else None
    if timing and timing.done():
        found["timed"] = timing.epochs()[1:]  # the first one warms up
    if row.tune:
        ((key, values),) = row.tune.items()
        tried = [run.result().get("holdout_ra") for run in plan.tries(row)]
        chosen = [run.edits for run in plan.tries(row)].index(plan.chosen(row))
        found["tuned"] = {key: values[chosen]}
        found["tried"] = [
            {key: value, "holdout_ra": ra} for value, ra in zip(values, tried, strict=True)
        ]
    return found


def _figures(plan: Plan, run: Run) -> dict[str, Any]:
    told = run.result()
    found = {"seed": run.seed} | {key: told[key] for key in KEPT if key in told}
    found["epochs_told"] = run.epochs()
    for measurement in plan.measurements():
        if measurement.run.folder == run.folder:
            found |= _measured(measurement.kind, measurement.result())
    return found


def _measured(kind: str, told: dict[str, Any]) -> dict[str, Any]:
    if not told:
        return {}
    if kind == "certify":
        by_radius = {f"r={it['radius']:g}": it["ca"] for it in told["ca"]}
        return by_radius | {"acr": told["acr"], "certified_images": told["images"]}
    if kind == "sweep":
        return {
            "curves": [{key: it[key] for key in ("over", "values", "ra")} for it in told["curves"]]
        }
    found = {"aa": told["aa"], "aa_images": told["images"]} if "aa" in told else {}
    return found | {"measured": {name: it["ra"] for name, it in told["suites"].items()}}


class Estimate(NamedTuple):
    """A mean over seeds, and the half-width of its 95 % interval (Student's t); none for one."""

    mean: float
    spread: float | None

    def text(self, digits: int) -> str:
        if self.spread is None:
            return f"{self.mean:.{digits}f}"
        return f"{self.mean:.{digits}f} ± {self.spread:.{digits}f}"


def estimate(values: Sequence[float]) -> Estimate:
    if len(values) < 2:
        return Estimate(values[0], None)
    width = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return Estimate(statistics.mean(values), float(width))


TIMES = {"comm_seconds_per_epoch": "comm_seconds", "train_seconds_per_epoch": "seconds"}
"""What an epoch calls them."""


def values_of(row: dict[str, Any], key: str) -> list[float]:
    """Over seeds, where it was found; times over the epochs of the run that was only timed."""
    if row.get("timed") and key in TIMES:
        return [epoch[TIMES[key]] for epoch in row["timed"]]
    return [run[key] for run in row["runs"] if run.get(key) is not None]


def cells(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[list[str]]:
    """The table's, row by row: ours, and in brackets the paper's where it has one."""
    lines = []
    for row in rows:
        if not row["shown"]:
            continue
        lines.append([row["name"], *(_cell(row, name) for name in names)])
    return lines


def _cell(row: dict[str, Any], name: str) -> str:
    key, _, digits = column(name)
    values = values_of(row, key)
    fallen = sum("diverged" in run for run in row["runs"])
    text = estimate(values).text(digits) if values else ""
    timed = row.get("timed") and key in TIMES
    if (
        not timed and 0 < len(values) < len(row["runs"]) - fallen
    ):  # the others are still to be measured
        text += f" (n = {len(values)})"
    if fallen and key in ("ta", "ra"):
        text = f"{text} ({fallen} of {len(row['runs'])} diverged)".strip()
    paper = row["paper"].get(name)
    return text if paper is None else f"{text} [{paper:g}]"


def headers(names: Sequence[str]) -> list[str]:
    return ["Method", *(column(name).header for name in names)]


def markdown(rows: Sequence[dict[str, Any]], names: Sequence[str], note: str) -> str:
    """The table, with a line below it."""
    head = headers(names)
    lines = [head, ["---"] * len(head), *cells(rows, names)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\n{note}\n"
