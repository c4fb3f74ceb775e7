"""What a study consists of, before any of it is run: its rows, its runs, and what they cost."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from dat.config.schema import RunConfig
from dat.core.glossary import plural
from dat.tools.planning.datasets import KNOWN_DATASETS
from dat.tools.reproduce.keys import flat
from dat.tools.reproduce.plan import StudyPlan
from dat.tools.reproduce.study import Study, StudyRow, study_header

WIDTH = 80
NARROWEST = 24
HEADERS = ("Row", "Runs", "Steps per run", "What differs")


def outline(plan: StudyPlan) -> dict[str, Any]:
    """The rows of a study with what differs between them, and the cost of its runs."""
    study = plan.study
    varied = varied_settings(study)
    rows: list[dict[str, Any]] = [
        {
            "row": row.name,
            "settings": settings,
            "tuned": row.tune,
            "seeds": plan.seeds,
            "runs": len(row.tunings()) - 1 + plan.seeds,
            "steps": steps_of(row),
        }
        for row, settings in zip(study.rows, varied, strict=True)
    ]
    steps = [row["steps"] for row in rows]
    total = None if None in steps else sum(row["runs"] * row["steps"] for row in rows)
    cost = {"runs": plan.count(), "steps": total, **estimated_time(plan)}
    return {"study": study.name, "scale": study.scale, "rows": rows, "cost": cost}


def varied_settings(study: Study) -> list[dict[str, Any]]:
    """For each row, the settings that are not the same in all rows, without those it tunes."""
    rows: list[dict[str, Any]] = [
        {"command": row.command, "workers": row.workers}
        | dict(flat(row.settings))
        | {f"labeller.{name}": value for name, value in flat(row.labeller)}
        for row in study.rows
    ]
    keys = dict.fromkeys(key for row in rows for key in row)
    varied = [key for key in keys if len({_text(row.get(key)) for row in rows}) > 1]
    return [
        {key: values[key] for key in varied if key in values and key not in row.tune}
        for row, values in zip(study.rows, rows, strict=True)
    ]


def steps_of(row: StudyRow) -> int | None:
    """The steps of a run; None if that depends on data that would have to be read."""
    if row.command != "train":  # then the settings alone are not a complete recipe
        return None
    config = row.config(row.tunings()[0])
    data, options = config.data, config.train.options
    known = KNOWN_DATASETS.get(data.name)
    is_mixed = data.unlabelled is not None or data.synthetic is not None
    if known is None or is_mixed or options.batch_schedule.epochs:
        return None
    return config.train.epochs * _steps_per_epoch(config, data.labelled_images(known.total))


def _steps_per_epoch(config: RunConfig, images: int) -> int:
    return (images - round(config.data.holdout * images)) // config.train.batch


def estimated_time(plan: StudyPlan) -> dict[str, Any]:
    """What the study's file states, and the time of the runs that are finished, if any are."""
    known = plan.known_runs() if plan.root.is_dir() else []
    finished = [run for run in known if run.done()]
    seconds = [
        result["train_seconds"]
        for result in (run.result() for run in finished)
        if "train_seconds" in result
    ]
    return {
        "stated": study_header(plan.study.name, plan.study.scale).get("Cost"),
        "finished": len(finished),
        "seconds_per_run": statistics.mean(seconds) if seconds else None,
    }


def outline_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The cells of a table that fits into 80 columns."""
    names = max(len(row["row"]) for row in rows)
    width = max(WIDTH - names - len("".join(HEADERS[1:3])) - 2 * (len(HEADERS) - 1), NARROWEST)
    return [
        [
            row["row"],
            str(row["runs"]),
            "-" if row["steps"] is None else f"{row['steps']:,}",
            "\n".join(_what_differs(row, width)),
        ]
        for row in rows
    ]


def _what_differs(row: Mapping[str, Any], width: int) -> list[str]:
    words = " ".join(f"{key}={_text(value)}" for key, value in row["settings"].items())
    lines = [words] if words else []
    lines += [
        f"{key} tuned over {', '.join(map(_text, values))}" for key, values in row["tuned"].items()
    ]
    return [
        piece
        for line in lines or ["-"]
        for piece in textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)
    ]


def describe_cost(cost: Mapping[str, Any], seeds: int) -> list[str]:
    """Sentences on the cost of a study."""
    total = "" if cost["steps"] is None else f", {cost['steps']:,} steps in total"
    lines = [f"{plural(cost['runs'], 'training run')} with {plural(seeds, 'seed')}{total}."]
    if cost["stated"]:
        lines.append(f"Cost, according to the study: {cost['stated']}.")
    if cost["seconds_per_run"] is not None:
        left = cost["runs"] - cost["finished"]
        each = cost["seconds_per_run"]
        lines.append(
            f"{plural(cost['finished'], 'run')} finished, {each:,.0f} s of training each on "
            f"average; at this rate, the other {left} take {left * each / 60:,.0f} min of training."
        )
    elif not cost["stated"]:
        lines.append("Cost: no estimate; the study states none, and no run is finished.")
    return [textwrap.fill(line, WIDTH) for line in lines]


def _text(value: object) -> str:
    """A value as on the command line."""
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value)
