"""Images a second under PGD-10, beside torchattacks, foolbox and ART: `dat bench attack`, twice.

    pip install foolbox adversarial-robustness-toolbox torchattacks
    python benchmarks/pgd_speed.py [--tuned]

--tuned makes glibc keep large tensors, for all alike.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from autoattack_speed import ALLOCATOR
from runs import save, table

from dat.tools.bench import Workload, bench_attack

CASES = {"width 16, batch 128": (16, 128), "width 64, batch 64": (64, 64)}
BASE = "torchattacks"
BASELINES = (BASE, "foolbox", "art", "plain")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.tuned and ALLOCATOR.items() - os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)
    speeds: dict[str, dict[str, float]] = {}
    for case, (width, batch) in CASES.items():
        timings = bench_attack(
            Workload(width=width, batch=batch), BASELINES, repeats=arguments.repeats
        )
        speeds[case] = {row["name"]: row["images_per_second"] for row in timings.rows()}
    rows = []
    for name in next(iter(speeds.values())):
        row = [name]
        for speed in speeds.values():
            row += [f"{speed[name]:.1f}", f"{speed[name] / speed[BASE]:.2f}"]
        rows.append(row)
    headers = ["PGD-10", *(word for case in CASES for word in (f"{case} (img/s)", "x"))]
    script = Path(__file__)
    save(script.with_stem(script.stem + "_tuned" * arguments.tuned), speeds, table(headers, rows))


if __name__ == "__main__":
    main()
