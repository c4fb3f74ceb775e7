"""The whole standard AutoAttack beside the reference implementation: seconds and passes.

    python benchmarks/autoattack_speed.py runs/cifar --reference auto-attack [--images 200]

The reference runs as one process with a thread for each core, ours as M workers of one thread, in
turns, on the same images and with the same allocator settings. Startup is left out on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from runs import save, table

ATTACKS = ("apgd-ce", "apgd-t", "fab-t", "square")
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
"""Large tensors are kept instead of given back to the system: fewer page faults, on both sides."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(run_reference(arguments.run, arguments.reference, arguments.images)))
        return
    cores = len(os.sched_getaffinity(0))
    theirs: list[dict[str, Any]] = []
    ours: dict[int, list[dict[str, Any]]] = {workers: [] for workers in range(1, cores + 1)}
    for turn in range(arguments.repeats):
        theirs.append(_call(__file__, str(arguments.run), "--only", *_options(arguments)))
        for workers, found in ours.items():
            found.append(_ours(arguments.run, arguments.images, workers))
        print(f"{turn + 1} of {arguments.repeats}")
        _show(theirs, ours)


def _show(theirs: list[dict[str, Any]], ours: dict[int, list[dict[str, Any]]]) -> None:
    """Write down what there is so far: a repetition takes long."""
    rows = [_row("reference", theirs), *(_row(f"ours, M = {m}", f) for m, f in ours.items())]
    base = rows[0]["seconds"]
    headers = ["", "s", "x", *(f"{name} (s)" for name in ATTACKS), "Forward", "Backward", "RA (%)"]
    lines = [
        [
            row["name"],
            f"{row['seconds']:.0f}",
            f"{base / row['seconds']:.2f}",
            *(f"{row['parts'][name]:.0f}" for name in ATTACKS),
            f"{row['forwards']:,}",
            f"{row['backwards']:,}",
            f"{row['ra']:.1f}",
        ]
        for row in rows
    ]
    save(Path(__file__), {"theirs": theirs, "ours": ours}, table(headers, lines))


def _options(arguments: argparse.Namespace) -> list[str]:
    return ["--reference", str(arguments.reference), "--images", str(arguments.images)]


def _call(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, *words],
        env=os.environ | ALLOCATOR,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout))


def _ours(run: Path, images: int, workers: int) -> dict[str, Any]:
    words = f"--attacks autoattack --images {images} --workers {workers} --json".split()
    words += ["--out", "none", "--no-checks", "comm.threads=1"]
    found = _call("-m", "dat", "evaluate", str(run), *words)
    costs = found["suites"]["autoattack"]["costs"]
    return {
        "seconds": found["seconds"],
        "parts": {name: cost["seconds"] / workers for name, cost in costs.items()},
        "forwards": sum(cost["forwards"] for cost in costs.values()),
        "backwards": sum(cost["backwards"] for cost in costs.values()),
        "ra": found["aa"],
    }


def run_reference(run: Path, folder: Path, images: int) -> dict[str, Any]:
    """One run of the reference, which tells of each attack's end through its log."""
    import torch
    from subjects import Counting, of_run, reference

    subject = of_run("", run, images, "linf", 8 / 255)
    counted = Counting(subject.model)
    attack = reference(folder)(subject, counted)
    ends = [time.perf_counter()]

    def log(text: str) -> None:
        if "robust accuracy after" in text:
            ends.append(time.perf_counter())

    attack.verbose, attack.logger.log = True, log
    x_adv = attack.run_standard_evaluation(subject.x, subject.y, bs=images)
    with torch.no_grad():
        stands = subject.model(x_adv).argmax(1) == subject.y
    return {
        "seconds": ends[-1] - ends[0],
        "parts": dict(zip(ATTACKS, (b - a for a, b in pairwise(ends)), strict=True)),
        "forwards": counted.forwards,
        "backwards": counted.backwards,
        "ra": 100.0 * float(stands.float().mean()),
    }


def _row(name: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the repeats."""
    median = statistics.median
    return found[0] | {
        "name": name,
        "seconds": median(each["seconds"] for each in found),
        "parts": {key: median(each["parts"][key] for each in found) for key in ATTACKS},
    }


if __name__ == "__main__":
    main()
