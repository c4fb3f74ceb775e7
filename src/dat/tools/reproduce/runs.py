"""The runs of a study: where they are, and how missing ones are made.

The name of a run's folder is its key (`keys.py`), so studies share runs, and finished runs are not
repeated. Every run is a `dat` command with its own recipe, which a user could run as well.
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import yaml

from dat.config.schema import RunConfig, merge
from dat.core.files import CHECKPOINTS, METRICS, RESULT, atomic_write
from dat.jobs.launch import dat_command
from dat.tools.reproduce.keys import differences, flat, keyed_settings, later_settings
from dat.tools.reproduce.study import StudyRow

DIVERGED = 3
"""The exit code (dat.cli) of a run whose loss becomes NaN or infinite: a result, not a failure."""
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class StudyRun:
    """A row of a study with one seed and one choice of the tuned setting."""

    root: Path
    row: StudyRow
    edits: dict[str, Any]
    seed: int
    origin: StudyRun | None = None
    """The run that is fine-tuned."""

    @property
    def settings(self) -> dict[str, Any]:
        return merge(merge(self.row.settings, self.edits), {"seed": self.seed})

    @property
    def config(self) -> RunConfig:
        return RunConfig.read(self.settings)

    @cached_property
    def key(self) -> str:
        """A hash of everything that decides the outcome, however the settings are written. If it
        names a run under other defaults of later settings, these settings become part of it."""
        config, stated = self.config, set[str]()
        later = later_settings(config)
        while True:
            key = self._key(keyed_settings(config, stated))
            recipe = self._recipe(key)
            saved = yaml.safe_load(recipe.read_text()) if later and recipe.is_file() else {}
            other = differences(saved, later) - stated
            if not other:
                return key
            stated |= other

    def _key(self, settings: dict[str, Any]) -> str:
        origin = self.origin.key if self.origin else None
        decisive = [self.row.command, self.row.workers, settings, self.row.labeller, origin]
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:12]

    def _recipe(self, key: str) -> Path:
        return self.root / f"{key}.yaml"

    @property
    def folder(self) -> Path:
        return self.root / self.key

    @property
    def output(self) -> Path:
        return self.folder

    @property
    def recipe(self) -> Path:
        return self._recipe(self.key)

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
        """The contents of result.json; for a run that diverged, its error message."""
        if self.failure.is_file():
            return dict(json.loads(self.failure.read_text()))
        return dict(json.loads((self.trained / RESULT).read_text()))

    def epochs(self) -> list[dict[str, Any]]:
        """The metrics of each epoch."""
        path = self.trained / METRICS
        lines = path.read_text().splitlines() if path.is_file() else []
        return [json.loads(line) for line in lines]

    def command(self, recipe: str, out: str, origin: str) -> list[str]:
        """The arguments of `dat`."""
        before = [origin] if self.row.origin else []
        words = [self.row.command, *before, recipe, "--workers", str(self.row.workers)]
        for key, value in flat(self.row.labeller):
            words += ["--base", f"{key}={value}"]
        return [*words, "--out", out]

    def prepare(self) -> list[str]:
        """Write the recipe, which states the later settings; return the command that uses it."""
        self.root.mkdir(parents=True, exist_ok=True)
        later = later_settings(self.config)
        if self.origin:
            later.pop("model", None)  # the network is the origin's, and other settings are refused
        settings = merge(self.settings, later)
        atomic_write(self.recipe, yaml.safe_dump(settings, sort_keys=False).encode())
        origin = str(self.origin.trained) if self.origin else ""
        return self.command(str(self.recipe), str(self.folder), origin)

    def make(self) -> None:
        """Run it, or resume it from its last checkpoint."""
        if self.done():
            return
        words = self.prepare()
        if self.row.command == "train" and (self.folder / CHECKPOINTS).is_dir():
            words = ["train", "--resume", str(self.folder), "--workers", str(self.row.workers)]
        elif self.folder.exists():
            words.append("--overwrite")
        code, errors = execute(words, self.folder.with_suffix(".log"))
        if code == DIVERGED:
            last = errors.strip().splitlines()[-1] if errors.strip() else "the loss is not finite"
            atomic_write(self.failure, json.dumps({"diverged": last}).encode())


@dataclass(frozen=True)
class Measurement:
    """A measurement of a finished run by another command."""

    run: StudyRun
    kind: str
    options: dict[str, Any]

    @property
    def file(self) -> Path:
        described = json.dumps([self.kind, self.options], sort_keys=True)
        key = hashlib.sha256(described.encode()).hexdigest()[:10]
        return self.run.trained / f"{self.kind}-{key}.json"

    @property
    def output(self) -> Path:
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
        _, output = execute(words, log, keep_output=True)
        atomic_write(self.file, json.dumps(json.loads(output), indent=1).encode())


Task = StudyRun | Measurement


def execute(words: Sequence[str], log: Path, *, keep_output: bool = False) -> tuple[int, str]:
    """Run `dat` with these arguments. Returns its exit code and its standard error, or its standard
    output if that is to be kept. Any failure other than divergence stops the study."""
    with log.open("w+") as file:
        code, output = start(words, file)
        file.seek(0)
        errors = file.read()
    if code not in (0, DIVERGED):
        last = (errors.strip().splitlines() or ["no error message"])[-1]
        how = f"failed: {last}" if code > 0 else f"was killed ({signal.Signals(-code).name})"
        raise ValueError(f"`dat {' '.join(words)}` {how}\nthe full output is in {log}")
    return code, output if keep_output else errors


def start(words: Sequence[str], log: IO[str]) -> tuple[int, str]:
    """Run `dat` in a new process, whose standard error goes to `log` as it is written. Returns its
    exit code and its standard output."""
    done = subprocess.run(dat_command(*words), stdout=subprocess.PIPE, stderr=log, text=True)
    return done.returncode, done.stdout


def run_missing(tasks: Iterable[Task], at_once: int, progress: Progress) -> None:
    """Run the tasks that are not done, `at_once` in parallel."""
    missing = list({task.output: task for task in tasks if not task.done()}.values())
    progress(0, len(missing))
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(task.make) for task in missing]
        try:
            for number, future in enumerate(as_completed(futures)):
                future.result()
                progress(number + 1, len(missing))
        except BaseException:
            for future in futures:
                future.cancel()
            raise
