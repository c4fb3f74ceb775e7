"""The results of a study by row and seed, and as a table in the paper's form."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from scipy import stats

from dat.tools.reproduce.plan import StudyPlan
from dat.tools.reproduce.runs import StudyRun
from dat.tools.reproduce.study import StudyRow


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
"""The entries of a run's result that are kept."""


def column(name: str) -> Column:
    """A column of the table; `r=0.1` is the certified accuracy at that radius."""
    if name.startswith("r="):
        return Column(name, f"{name} (%)", 1)
    return COLUMNS[name]


def collect(plan: StudyPlan) -> list[dict[str, Any]]:
    """All rows with the results of their runs."""
    return [_row(plan, row) for row in plan.study.rows]


def _row(plan: StudyPlan, row: StudyRow) -> dict[str, Any]:
    runs = [plan.run(row, seed) for seed in range(plan.seeds)]
    results: dict[str, Any] = {
        "name": row.name,
        "shown": row.shown,
        "workers": row.workers,
        "labels": row.labels,
        "paper": row.paper,
        "runs": [_results(plan, run) for run in runs],
    }
    timing = plan.timing(row) if plan.study.timed and row.shown else None
    if timing and timing.done():
        results["timed"] = timing.epochs()[1:]  # the first epoch is the warm-up
    if row.tune:
        ((key, values),) = row.tune.items()
        tried = [run.result().get("holdout_ra") for run in plan.tries(row)]
        chosen = [run.edits for run in plan.tries(row)].index(plan.chosen(row))
        results["tuned"] = {key: values[chosen]}
        results["tried"] = [
            {key: value, "holdout_ra": ra} for value, ra in zip(values, tried, strict=True)
        ]
    return results


def _results(plan: StudyPlan, run: StudyRun) -> dict[str, Any]:
    result = run.result()
    kept = {"seed": run.seed} | {key: result[key] for key in KEPT if key in result}
    kept["epochs_told"] = run.epochs()
    for measurement in plan.measurements():
        if measurement.run.folder == run.folder:
            kept |= _measured(measurement.kind, measurement.result())
    return kept


def _measured(kind: str, result: dict[str, Any]) -> dict[str, Any]:
    if not result:
        return {}
    if kind == "certify":
        by_radius = {f"r={at['radius']:g}": at["ca"] for at in result["ca"]}
        return by_radius | {"acr": result["acr"], "certified_images": result["images"]}
    if kind == "sweep":
        keys = ("over", "values", "ra")
        return {"curves": [{key: curve[key] for key in keys} for curve in result["curves"]]}
    kept = {"aa": result["aa"], "aa_images": result["images"]} if "aa" in result else {}
    return kept | {"measured": {name: suite["ra"] for name, suite in result["suites"].items()}}


class Estimate(NamedTuple):
    """A mean over seeds and the half-width of its 95 % interval (Student's t), if there are
    several."""

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
"""The names of times in a run's result, and in the metrics of an epoch."""


def values_of(row: dict[str, Any], key: str) -> list[float]:
    """The values of all seeds that have one; times are of the epochs of the timed run, if there is
    one."""
    if row.get("timed") and key in TIMES:
        return [epoch[TIMES[key]] for epoch in row["timed"]]
    return [run[key] for run in row["runs"] if run.get(key) is not None]


def cells(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[list[str]]:
    """The cells of the table, row by row, with the paper's values in brackets."""
    lines = []
    for row in rows:
        if not row["shown"]:
            continue
        lines.append([row["name"], *(_cell(row, name) for name in names)])
    return lines


def _cell(row: dict[str, Any], name: str) -> str:
    key, _, digits = column(name)
    values = values_of(row, key)
    diverged = sum("diverged" in run for run in row["runs"])
    text = estimate(values).text(digits) if values else ""
    is_timed = row.get("timed") and key in TIMES
    if not is_timed and 0 < len(values) < len(row["runs"]) - diverged:  # some are not measured yet
        text += f" (n = {len(values)})"
    if diverged and key in ("ta", "ra"):
        text = f"{text} ({diverged} of {len(row['runs'])} diverged)".strip()
    paper = row["paper"].get(name)
    return text if paper is None else f"{text} [{paper:g}]"


def headers(names: Sequence[str]) -> list[str]:
    return ["Method", *(column(name).header for name in names)]


def markdown(rows: Sequence[dict[str, Any]], names: Sequence[str], note: str) -> str:
    """The table in Markdown, with a note below it."""
    head = headers(names)
    lines = [head, ["---"] * len(head), *cells(rows, names)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\n{note}\n"
