"""Run a study, or continue it, and write its results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from dat.core.files import atomic_write
from dat.core.glossary import legend
from dat.data.catalog import CATALOG
from dat.data.fetch import cached, fetch
from dat.report import bytes_bar, progress_bar
from dat.tools.reproduce.figures import collect, headers, markdown
from dat.tools.reproduce.plan import LAST_TRAINING, TIMING, StudyPlan
from dat.tools.reproduce.plots import draw
from dat.tools.reproduce.runs import StudyRun, run_missing
from dat.tools.reproduce.study import Study

PICTURES = (".png", ".svg")
RECIPES = "recipes"
LEGEND = (
    "Mean and 95 % confidence interval over {seeds} seeds; the paper's values in brackets. "
    "{terms} `{command}`"
)
TIMED = "C and T are means over {epochs} epochs of a run that had the machine to itself."


def reproduce(
    study: Study,
    *,
    seeds: int | None = None,
    runs: Path = Path("runs/reproduce"),
    out: Path = Path("results"),
    at_once: int = 1,
    quiet: bool = False,
) -> dict[str, Any]:
    """Run what is missing, and write OUT/STUDY: JSON, Markdown, plots, recipes."""
    for name in sorted(study.data & CATALOG.keys()):
        if cached(name) is None:
            with bytes_bar(name, show=not quiet) as progress:
                fetch(name, progress=progress)
    plan = StudyPlan(study, runs, study.seeds if seeds is None else seeds)
    for title, tasks in plan.stages():
        with progress_bar(f"{study.name}: {title}", show=not quiet) as progress:
            run_missing(tasks, 1 if title == TIMING else at_once, progress)
        if title == LAST_TRAINING:  # preliminary results, before the measurements
            write_results(plan, out)
    return write_results(plan, out)


def write_results(plan: StudyPlan, out: Path) -> dict[str, Any]:
    """Write the results of all runs, and return those in results.json."""
    study, folder = plan.study, out / plan.study.name
    folder.mkdir(parents=True, exist_ok=True)
    rows = collect(plan)
    for row, figures in zip(study.rows, rows, strict=True):
        figures["command"] = _write_recipe(plan.run(row, 0), folder)
    command = f"dat reproduce {study.name}" + (" --scale paper" if study.scale == "paper" else "")
    command += f" --seeds {plan.seeds}" if plan.seeds != study.seeds else ""
    note = _note(plan, rows, command)
    results: dict[str, Any] = {
        "study": study.name,
        "scale": study.scale,
        "title": study.title,
        "about": study.about,
        "command": command,
        "seeds": plan.seeds,
        "train_seconds": sum(run.result().get("train_seconds", 0.0) for run in plan.all_runs()),
        "environment": _environment(plan),
        "columns": list(study.columns),
        "rows": rows,
        "note": note,
    }
    atomic_write(folder / "results.json", (json.dumps(results, indent=1) + "\n").encode())
    atomic_write(folder / "table.md", markdown(rows, study.columns, note).encode())
    for ending in PICTURES:
        draw(folder / f"plot{ending}", study.title, rows, study.plot, study.columns)
    return results


def _note(plan: StudyPlan, rows: list[dict[str, Any]], command: str) -> str:
    """The line below the table."""
    attacks = {str(run.get("attack")) for row in rows for run in row["runs"] if run.get("attack")}
    terms = legend(headers(plan.study.columns), RA=", ".join(sorted(attacks)))
    note = LEGEND.format(
        seeds=plan.seeds, terms=terms if attacks else "No run was evaluated.", command=command
    )
    if all(row.get("timed") for row in rows if row["shown"]):
        note = f"{note} {TIMED.format(epochs=plan.study.timed - 1)}"
    return note


def _write_recipe(run: StudyRun, folder: Path) -> str:
    """Write the recipe of a row, without its seed; return the command for the first seed."""
    values = {key: value for key, value in run.settings.items() if key != "seed"}
    path = folder / RECIPES / f"{_slug(run.row.name)}.yaml"
    path.parent.mkdir(exist_ok=True)
    atomic_write(path, yaml.safe_dump(values, sort_keys=False).encode())
    origin = f"runs/{_slug(run.row.origin)}" if run.row.origin else ""
    words = run.command(str(path), f"runs/{_slug(run.row.name)}", origin)
    return " ".join(["dat", *words, "seed=0"])


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _environment(plan: StudyPlan) -> dict[str, Any]:
    """The environment of the first run that has saved it."""
    for row in plan.study.rows:
        path = plan.run(row, 0).trained / "environment.json"
        if path.is_file():
            environment = json.loads(path.read_text())
            dropped = ("command", "workers", "threads", "launch", "host", "hosts")
            return {key: value for key, value in environment.items() if key not in dropped}
    return {}
