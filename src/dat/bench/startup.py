"""`dat bench startup`: how long until a command does its work, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence

from dat.bench.limits import describe_machine, measure_limits, use_threads
from dat.bench.peers import choose
from dat.bench.race import Job, Race, take_turns

FIRST_STEP = """
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
COMMANDS = {
    "torch": ("import torch", ["-c", "import torch"]),
    "dat": ("import dat", ["-c", "import dat"]),
    "help": ("dat --help", ["-m", "dat", "--help"]),
    "train": ("dat train digits, to the end of the first step", ["-c", FIRST_STEP]),
}


def bench_startup(
    against: Sequence[str] = tuple(COMMANDS),
    *,
    repeats: int = 5,
    seconds: float = 0.0,
    threads: int | None = None,
) -> Race:
    """Ratios are to the first; the limit is an interpreter that does nothing. The threads are those
    of the machine's own figures."""
    use_threads(threads)
    jobs = {name: _process(words) for name, words in choose(against, COMMANDS).values()}
    nothing = _process(["-c", "pass"])
    machine = describe_machine(measure_limits())
    idle = "an interpreter that does nothing"
    timings = take_turns(
        {**jobs, idle: nothing}, repeats=repeats, seconds=seconds, title="starting"
    )
    return Race(
        bench="startup",
        timings=timings,
        machine=machine,
        least=dict.fromkeys(timings, min(timings[idle].seconds)),
        limit=idle,
        settings={"python": sys.version.split()[0]},
    )


def _process(words: Sequence[str]) -> Job:
    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False
            )
        if done.returncode:
            raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")

    return run
