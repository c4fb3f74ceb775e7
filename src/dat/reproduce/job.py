"""Run a study, or go on with it, and write down what came out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from dat.data.catalog import CATALOG
from dat.data.fetch import cached, fetch
from dat.files import write_whole
from dat.report import bytes_bar, gauge
from dat.reproduce.figures import collect, markdown
from dat.reproduce.plots import draw
from dat.reproduce.runs import LAST_TRAINING, TIMING, Plan, Run, carry_out, slug
from dat.reproduce.study import Study

PICTURES = (".png", ".svg")
RECIPES = "recipes"
LEGEND = (
    "Mean and 95 % interval over {seeds} seeds; in brackets, the paper's figure. {attack}. "
    "`{command}`"
)

TIMED = "C and T are of {epochs} epochs of a run that had the machine to itself."


def reproduce(
    study: Study,
    *,
    seeds: int | None = None,
    runs: Path = Path("runs/reproduce"),
    out: Path = Path("results"),
    at_once: int = 1,
    quiet: bool = False,
) -> dict[str, Any]:
    """Make what is missing, and write OUT/STUDY: JSON, Markdown, pictures, recipes."""
    for name in sorted(study.data & CATALOG.keys()):
        if cached(name) is None:
            with bytes_bar(name, show=not quiet) as told:
                fetch(name, progress=told)
    plan = Plan(study, runs, study.seeds if seeds is None else seeds)
    for title, jobs in plan.stages():
        with gauge(f"{study.name}: {title}", show=not quiet) as progress:
            carry_out(jobs, 1 if title == TIMING else at_once, progress)
        if title == LAST_TRAINING:  # what there is, while the rest is measured
            write_down(plan, out)
    return write_down(plan, out)


def write_down(plan: Plan, out: Path) -> dict[str, Any]:
    """What all runs came to."""
    study, folder = plan.study, out / plan.study.name
    folder.mkdir(parents=True, exist_ok=True)
    rows = collect(plan)
    for row in study.rows:
        first = plan.run(row, 0)
        values = {key: value for key, value in first.settings.items() if key != "seed"}
        path = folder / RECIPES / f"{slug(row.name)}.yaml"
        path.parent.mkdir(exist_ok=True)
        write_whole(path, yaml.safe_dump(values, sort_keys=False).encode())
        told = next(it for it in rows if it["name"] == row.name)
        told["command"] = _command(plan, first, folder)
    attacks = {str(run.get("attack")) for row in rows for run in row["runs"] if run.get("attack")}
    command = f"dat reproduce {study.name}" + (" --scale paper" if study.scale == "paper" else "")
    command += f" --seeds {plan.seeds}" if plan.seeds != study.seeds else ""
    under = f"RA: {', '.join(sorted(attacks))}" if attacks else "No run was measured"
    note = LEGEND.format(seeds=plan.seeds, attack=under, command=command)
    if all(row.get("timed") for row in rows if row["shown"]):
        note = f"{note} {TIMED.format(epochs=study.timed - 1)}"
    found: dict[str, Any] = {
        "study": study.name,
        "scale": study.scale,
        "title": study.title,
        "about": study.about,
        "command": command,
        "seeds": plan.seeds,
        "train_seconds": sum(run.result().get("train_seconds", 0.0) for run in plan.known()),
        "environment": _environment(plan),
        "columns": list(study.columns),
        "rows": rows,
        "note": note,
    }
    write_whole(folder / "results.json", (json.dumps(found, indent=1) + "\n").encode())
    write_whole(folder / "table.md", markdown(rows, study.columns, note).encode())
    for ending in PICTURES:
        draw(folder / f"plot{ending}", study.title, rows, study.plot, study.columns)
    return found


def _command(plan: Plan, run: Run, folder: Path) -> str:
    """As a user would type it, with the first seed."""
    recipe = folder / RECIPES / f"{slug(run.row.name)}.yaml"
    origin = f"runs/{slug(run.row.origin)}" if run.row.origin else ""
    words = run.command(str(recipe), f"runs/{slug(run.row.name)}", origin)
    return " ".join(["dat", *words, "seed=0"])


def _environment(plan: Plan) -> dict[str, Any]:
    """Of the first run that has told."""
    for row in plan.study.rows:
        path = plan.run(row, 0).trained / "environment.json"
        if path.is_file():
            told = json.loads(path.read_text())
            dropped = ("command", "workers", "threads", "launch", "host", "hosts")
            return {key: value for key, value in told.items() if key not in dropped}
    return {}
