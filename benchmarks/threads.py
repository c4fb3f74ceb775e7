"""How long idle threads spin before they sleep, on idle and on busy cores: `dat profile`.

    python benchmarks/threads.py [--rounds 5]

Spinning threads start the next operation sooner; sleeping ones leave the core to others. It needs
an idle machine, and keeps the cores busy itself, with an endless loop for each. The networks are a
tiny one and a PreActResNet-18 of width 16 with batches of 64 images.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runs import save, table

POLICIES = {
    "spin 300,000 times (libgomp's default)": {"GOMP_SPINCOUNT": "300000"},
    "spin 1,000 times (ours)": {"GOMP_SPINCOUNT": "1000"},
    "sleep at once (OMP_WAIT_POLICY=PASSIVE)": {"OMP_WAIT_POLICY": "PASSIVE"},
}
CIFAR = ["data.name=cifar10", "model.name=preact-resnet18", "model.width=16", "train.batch=64"]
WORK = {
    "digits, CNN": ["digits", "--steps", "10"],
    "CIFAR-10, PreActResNet-18": ["digits", *CIFAR, "--steps", "2"],
}
OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
LOADS = ("idle", "busy")
Speeds = dict[str, dict[str, list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    speeds: Speeds = {f"{work}, {load}": {} for work in WORK for load in LOADS}
    for _ in range(rounds):
        for load in LOADS:
            with busy(len(os.sched_getaffinity(0)) if load == "busy" else 0):
                for work, words in WORK.items():
                    for name, policy in POLICIES.items():
                        speed = images_per_second(words, policy)
                        speeds[f"{work}, {load}"].setdefault(name, []).append(speed)
                        print(f"{work}, {load}, {name}: {speed:.0f}", flush=True)
    save(Path(__file__), speeds, _table(speeds))


def images_per_second(words: list[str], policy: dict[str, str]) -> float:
    """Of a training step with two threads."""
    command = [sys.executable, "-m", "dat", "profile", *words, "comm.threads=2"]
    clean = {name: value for name, value in os.environ.items() if name not in OPENMP}
    done = subprocess.run(
        [*command, "--json"],
        env=clean | policy,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    profile: dict[str, Any] = json.loads(done.stdout)
    return float(profile["images_per_second"])


@contextmanager
def busy(cores: int) -> Iterator[None]:
    """Keep this many cores busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _table(speeds: Speeds) -> str:
    rows = []
    for policy in POLICIES:
        row = [policy]
        for by_policy in speeds.values():
            medians = {name: statistics.median(values) for name, values in by_policy.items()}
            base = medians[next(iter(POLICIES))]
            row += [f"{medians[policy]:.0f}", f"{medians[policy] / base:.2f}"]
        rows.append(row)
    return table(["idle threads", *(word for case in speeds for word in (case, "x"))], rows)


if __name__ == "__main__":
    main()
