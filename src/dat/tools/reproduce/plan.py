"""The plan of a study: all its runs and measurements, stage by stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dat.tools.reproduce.runs import Measurement, StudyRun, Task
from dat.tools.reproduce.study import Study, StudyRow

LAST_TRAINING = "fine-tuning"
"""The stage after which all models are trained."""
TIMING = "timing"
"""The stage whose runs must not share the machine."""


class StudyPlan:
    """All runs of a study. Those that depend on the results of others are known only after them."""

    def __init__(self, study: Study, root: Path, seeds: int) -> None:
        self.study, self.root, self.seeds = study, root, seeds

    def tuning(self) -> list[StudyRun]:
        """One run per value of each tuned setting, with the first seed."""
        return [run for row in self.study.rows if row.tune for run in self.tries(row)]

    def tries(self, row: StudyRow) -> list[StudyRun]:
        return [StudyRun(self.root, row, edits, 0) for edits in row.tunings()]

    def chosen(self, row: StudyRow) -> dict[str, Any]:
        """The edits with the highest RA on held-out images, the first of equals."""
        if not row.tune:
            return {}
        return max(self.tries(row), key=lambda run: run.result().get("holdout_ra", -1.0)).edits

    def run(self, row: StudyRow, seed: int) -> StudyRun:
        origin = self.run(self.study.row(row.origin), seed) if row.origin else None
        return StudyRun(self.root, row, self.chosen(row), seed, origin)

    def runs(self, *, finetuned: bool) -> list[StudyRun]:
        """The runs of all rows that are fine-tuned from other rows, or that are not."""
        rows = [row for row in self.study.rows if (row.origin is not None) == finetuned]
        return [self.run(row, seed) for seed in range(self.seeds) for row in rows]

    def all_runs(self) -> list[StudyRun]:
        """All training runs, including those of tuning, without duplicates."""
        runs = [*self.tuning(), *self.runs(finetuned=False), *self.runs(finetuned=True)]
        return list({run.key: run for run in runs}.values())

    def timing(self, row: StudyRow) -> StudyRun:
        """A short run whose only purpose is to be timed."""
        run, epochs = self.run(row, 0), self.study.timed
        warmup = run.settings.get("schedule", {}).get("warmup", 0)
        short: dict[str, dict[str, Any]] = {
            "train": {"epochs": epochs, "select_every": epochs},
            "schedule": {"warmup": min(warmup, epochs)},
            "evaluate": {"images": 10, "report": 0},
        }
        edits = {group: run.edits.get(group, {}) | own for group, own in short.items()}
        return StudyRun(run.root, row, run.edits | edits, 0, run.origin)

    def timings(self) -> list[StudyRun]:
        return [self.timing(row) for row in self.study.rows if row.shown and self.study.timed]

    def measurements(self) -> list[Measurement]:
        """All measurements of the rows in the table."""
        return [
            Measurement(self.run(row, seed), kind, options)
            for seed in range(self.seeds)
            for row in self.study.rows
            if row.shown
            for kind, options in self.study.measure.items()
        ]

    def count(self) -> int:
        """The number of training runs."""
        rows = self.study.rows
        tried = sum(len(row.tunings()) - 1 for row in rows if row.tune)
        return tried + self.seeds * len(rows)

    def known_runs(self) -> list[StudyRun]:
        """All training runs that are known so far: of a tuned row its tuning runs until they are
        finished, then its seeds."""
        runs = []
        for row in self.study.rows:
            tries = self.tries(row) if row.tune else []
            is_tuned = all(run.done() for run in tries)
            runs += tries
            runs += [self.run(row, seed) for seed in range(self.seeds)] if is_tuned else []
        return list({run.key: run for run in runs}.values())

    def listing(self) -> list[dict[str, Any]]:
        """The training runs that are known so far, as commands whose recipes are written. Their
        results are then found here."""
        return [
            {
                "row": run.row.name,
                "seed": str(run.seed),
                "done": run.done(),
                "command": " ".join(["dat", *run.prepare()]),
            }
            for run in self.known_runs()
        ]

    def stages(self) -> Iterable[tuple[str, Sequence[Task]]]:
        """Stages in order; each depends on the results of those before it."""
        yield "tuning", self.tuning()
        yield "training", self.runs(finetuned=False)
        yield LAST_TRAINING, self.runs(finetuned=True)
        yield "measuring", self.measurements()
        yield TIMING, self.timings()
