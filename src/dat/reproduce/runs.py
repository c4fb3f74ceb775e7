"""The runs of a study: which there are, where they lie, and making those that are missing.

A run's folder is named after all that decides it, so that studies share their runs, and what is
there is not run again. Every run is a command that a user could type, with a recipe of its own.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import yaml

from dat.config import RunConfig, merge
from dat.files import write_whole
from dat.reproduce.study import Row, Study
from dat.train.folder import CHECKPOINTS, METRICS, RESULT

DIVERGED = 3
"""The exit code (dat.cli) of a run whose loss became NaN or infinite: a result, no accident."""
LAST_TRAINING = "fine-tuning"
"""The stage after which all models are there."""
TIMING = "timing"
"""The stage whose runs have the machine to themselves."""
Progress = Callable[[int, int], None]


LATER = {"train": ("bn", "ghost", "grow", "grow_by"), "comm": ("shard", "gather")}
"""Settings that came after runs were made: who leaves them alone keeps those."""
USUAL = RunConfig().dump()


@dataclass(frozen=True)
class Run:
    """A row with one seed, and with what was tuned."""

    root: Path
    row: Row
    edits: dict[str, Any]
    seed: int
    origin: Run | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return merge(merge(self.row.settings, self.edits), {"seed": self.seed})

    @cached_property
    def key(self) -> str:
        """Of all that decides what comes out, however it was written."""
        origin = self.origin.key if self.origin else None
        config = RunConfig.read(self.settings).dump()
        del config["train"]["log"]  # where figures go changes none of them,
        del config["evaluate"]["report"]  # nor does what is looked at when all is done
        for group, names in LATER.items():
            for name in names:
                if config[group][name] == USUAL[group][name]:
                    del config[group][name]
        told = [self.row.command, self.row.workers, config, self.row.labeller, origin]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def folder(self) -> Path:
        return self.root / self.key

    @property
    def place(self) -> Path:
        return self.folder

    @property
    def recipe(self) -> Path:
        return self.folder.with_suffix(".yaml")

    @property
    def trained(self) -> Path:
        """The folder with the model."""
        return self.folder / "robust" if self.row.command == "selftrain" else self.folder

    @property
    def failure(self) -> Path:
        return self.folder.with_suffix(".diverged.json")

    def done(self) -> bool:
        return (self.trained / RESULT).is_file() or self.failure.is_file()

    def result(self) -> dict[str, Any]:
        """Its figures; of a run that diverged, that it did."""
        if self.failure.is_file():
            return dict(json.loads(self.failure.read_text()))
        return dict(json.loads((self.trained / RESULT).read_text()))

    def epochs(self) -> list[dict[str, Any]]:
        """What was noted after each."""
        path = self.trained / METRICS
        lines = path.read_text().splitlines() if path.is_file() else []
        return [json.loads(line) for line in lines]

    def command(self, recipe: str, out: str, origin: str) -> list[str]:
        """What a user would type after `dat`."""
        before = [origin] if self.row.origin else []
        words = [self.row.command, *before, recipe, "--workers", str(self.row.workers)]
        for key, value in _flat(self.row.labeller):
            words += ["--base", f"{key}={value}"]
        return [*words, "--out", out]

    def prepare(self) -> list[str]:
        """Write its recipe; gives the command that takes it."""
        self.root.mkdir(parents=True, exist_ok=True)
        write_whole(self.recipe, yaml.safe_dump(self.settings, sort_keys=False).encode())
        origin = str(self.origin.trained) if self.origin else ""
        return self.command(str(self.recipe), str(self.folder), origin)

    def make(self) -> None:
        """Run it, or go on with it."""
        if self.done():
            return
        words = self.prepare()
        if self.row.command == "train" and (self.folder / CHECKPOINTS).is_dir():
            words = ["train", "--resume", str(self.folder), "--workers", str(self.row.workers)]
        elif self.folder.exists():
            words.append("--overwrite")
        code, told = execute(words, self.folder.with_suffix(".log"))
        if code == DIVERGED:
            last = told.strip().splitlines()[-1] if told.strip() else "the loss is not finite"
            write_whole(self.failure, json.dumps({"diverged": last}).encode())


@dataclass(frozen=True)
class Measurement:
    """Something that is measured of a run by a command of its own."""

    run: Run
    kind: str
    options: dict[str, Any]

    @property
    def file(self) -> Path:
        told = json.dumps([self.kind, self.options], sort_keys=True)
        key = hashlib.sha256(told.encode()).hexdigest()[:10]
        return self.run.trained / f"{self.kind}-{key}.json"

    @property
    def place(self) -> Path:
        return self.file

    def done(self) -> bool:
        return self.file.is_file() or self.run.failure.is_file()

    def result(self) -> dict[str, Any]:
        return dict(json.loads(self.file.read_text())) if self.file.is_file() else {}

    def command(self, run: str) -> list[str]:
        options = dict(self.options)
        words = [self.kind, run]
        words += [f"{key}={value}" for key, value in options.pop("settings", {}).items()]
        for key, value in options.items():
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words += [f"--{key}", text]
        return words

    def make(self) -> None:
        if self.done():
            return
        words = [*self.command(str(self.run.trained)), "--json", "--quiet"]
        log = self.file.with_suffix(".log")
        _, told = execute(words, log, keep_output=True)
        write_whole(self.file, json.dumps(json.loads(told), indent=1).encode())


Job = Run | Measurement


def execute(words: Sequence[str], log: Path, *, keep_output: bool = False) -> tuple[int, str]:
    """`dat` with these words; its exit code, and what it said: on standard output, to be kept, or
    as errors. Whatever fails otherwise than by diverging stops the study."""
    with log.open("w+") as said:
        code, output = start(words, said)
        said.seek(0)
        errors = said.read()
    if code not in (0, DIVERGED):
        last = (errors.strip().splitlines() or ["it said nothing"])[-1]
        how = f"failed: {last}" if code > 0 else f"was killed ({signal.Signals(-code).name})"
        raise ValueError(f"`dat {' '.join(words)}` {how}\nall it said is in {log}")
    return code, output if keep_output else errors


def start(words: Sequence[str], said: IO[str]) -> tuple[int, str]:
    """In a process of its own, which tells what it does while it does it; its exit code and what it
    put out."""
    command = [sys.executable, "-m", "dat", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=said, text=True)
    return done.returncode, done.stdout


def carry_out(jobs: Iterable[Job], at_once: int, progress: Progress) -> None:
    """Make what is missing, so many at a time."""
    missing = list({job.place: job for job in jobs if not job.done()}.values())
    progress(0, len(missing))
    with ThreadPoolExecutor(at_once) as pool:
        waiting = [pool.submit(job.make) for job in missing]
        try:
            for number, one in enumerate(as_completed(waiting)):
                one.result()
                progress(number + 1, len(missing))
        except BaseException:
            for one in waiting:
                one.cancel()
            raise


class Plan:
    """All runs of a study; those that depend on others are known once these are there."""

    def __init__(self, study: Study, root: Path, seeds: int) -> None:
        self.study, self.root, self.seeds = study, root, seeds

    def tuning(self) -> list[Run]:
        """With the first seed, every value to choose from."""
        return [run for row in self.study.rows if row.tune for run in self.tries(row)]

    def tries(self, row: Row) -> list[Run]:
        return [Run(self.root, row, edits, 0) for edits in row.tunings()]

    def chosen(self, row: Row) -> dict[str, Any]:
        """The edits with the highest held-out RA; the first of equals."""
        if not row.tune:
            return {}
        return max(self.tries(row), key=lambda run: run.result().get("holdout_ra", -1.0)).edits

    def run(self, row: Row, seed: int) -> Run:
        origin = self.run(self.study.row(row.origin), seed) if row.origin else None
        return Run(self.root, row, self.chosen(row), seed, origin)

    def runs(self, *, of_others: bool) -> list[Run]:
        """Of the rows that start from others, or of those that do not."""
        rows = [row for row in self.study.rows if (row.origin is not None) == of_others]
        return [self.run(row, seed) for seed in range(self.seeds) for row in rows]

    def known(self) -> list[Run]:
        """All runs, those of tuning too, each once."""
        runs = [*self.tuning(), *self.runs(of_others=False), *self.runs(of_others=True)]
        return list({run.key: run for run in runs}.values())

    def timing(self, row: Row) -> Run:
        """A short run with nothing beside it, for its times only."""
        run, epochs = self.run(row, 0), self.study.timed
        warmup = run.settings.get("schedule", {}).get("warmup", 0)
        short: dict[str, dict[str, Any]] = {
            "train": {"epochs": epochs, "select_every": epochs},
            "schedule": {"warmup": min(warmup, epochs)},
            "evaluate": {"images": 10, "report": 0},
        }
        edits = {group: run.edits.get(group, {}) | own for group, own in short.items()}
        return Run(run.root, row, run.edits | edits, 0, run.origin)

    def timings(self) -> list[Run]:
        return [self.timing(row) for row in self.study.rows if row.shown and self.study.timed]

    def measurements(self) -> list[Measurement]:
        """Of the rows that are shown."""
        return [
            Measurement(self.run(row, seed), kind, options)
            for seed in range(self.seeds)
            for row in self.study.rows
            if row.shown
            for kind, options in self.study.measure.items()
        ]

    def count(self) -> int:
        """Runs in all."""
        rows = self.study.rows
        tried = sum(len(row.tunings()) - 1 for row in rows if row.tune)
        return tried + self.seeds * len(rows)

    def listing(self) -> list[dict[str, Any]]:
        """Every training run, as far as it is known yet, with its recipe written: to be started by
        hand, on a cluster say. What they leave is then found here."""
        found = []
        for row in self.study.rows:
            known = all(run.done() for run in self.tries(row)) or not row.tune
            runs = [self.run(row, seed) for seed in range(self.seeds)] if known else self.tries(row)
            for run in runs:
                command = " ".join(["dat", *run.prepare()])
                told = {"row": row.name, "seed": str(run.seed), "done": run.done()}
                found.append(told | {"command": command})
        return found

    def stages(self) -> Iterable[tuple[str, list[Any]]]:
        """One after the other, as each decides what the next one is."""
        yield "tuning", self.tuning()
        yield "training", self.runs(of_others=False)
        yield LAST_TRAINING, self.runs(of_others=True)
        yield "measuring", self.measurements()
        yield TIMING, self.timings()


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _flat(values: dict[str, Any], above: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
