"""`dat bench startup`: the time until a command starts to work, each in a new process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

from dat.tools.bench.baselines import BASELINES, load_baselines
from dat.tools.bench.limits import describe_machine, measure_limits, use_threads
from dat.tools.bench.timing import Comparison, Turn, take_turns


class Start(NamedTuple):
    """Something that starts the interpreter."""

    title: str
    words: list[str]
    """The interpreter's arguments."""


EXIT_AFTER_FIRST_STEP = """
import os
from dat.train import trainer
step = trainer.dat_step
def first(*words):
    step(*words)
    os._exit(0)
trainer.dat_step = first
from dat.cli import main
main(["train", "digits", "--quiet", "--out", "run"])
"""
IMPORT_TORCH = Start("import torch", ["-c", "import torch"])
IMPORT_DAT = Start("import dat", ["-c", "import dat"])
SHOW_HELP = Start("dat --help", ["-m", "dat", "--help"])
FIRST_STEP = Start("dat train digits, to the end of the first step", ["-c", EXIT_AFTER_FIRST_STEP])
IDLE = Start("an interpreter that does nothing", ["-c", "pass"])


def bench_startup(
    against: Sequence[str] = tuple(BASELINES["startup"]),
    *,
    repeats: int = 5,
    seconds: float = 0.0,
    threads: int | None = None,
) -> Comparison:
    """Ratios are to the first; the limit is an interpreter that does nothing. `threads` only
    affects the rates of the machine."""
    use_threads(threads)
    starts = [*load_baselines("startup", against).values(), IDLE]
    machine = describe_machine(measure_limits())
    turns = {start.title: _process(start.words) for start in starts}
    timings = take_turns(turns, repeats=repeats, seconds=seconds, title="starting")
    return Comparison(
        bench="startup",
        timings=timings,
        machine=machine,
        least=dict.fromkeys(timings, min(timings[IDLE.title].seconds)),
        limit=IDLE.title,
        settings={"python": sys.version.split()[0]},
    )


def _process(words: Sequence[str]) -> Turn:
    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False
            )
        if done.returncode:
            raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")

    return run
