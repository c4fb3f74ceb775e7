"""Large batches with and without LALR: a first measurement on Fashion-MNIST.

    python benchmarks/large_batch.py fashion.npz [--seeds 3] [--jobs 2]

Of 4,500 training images a batch of 1,125 leaves 4 steps an epoch, where 64 gives 70. For each
method the learning rate is tuned with seed 0 on held-out images: doubled or halved from the same
kind of start for as long as the RA improves. The tuned rate is then run with every seed and
measured on the test images. Same epochs, attack and schedule for all; the small batch is what the
large one should not fall behind. The network has no batch normalization, so the number of workers
does not change the result; each run is one worker on one thread, `jobs` of them at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from runs import mean_and_spread, save, table, train

RECIPE = str(Path(__file__).with_name("fashion.yaml"))
SMALL, LARGE = 64, 1125
SGD = ("optimizer.name=sgd", "optimizer.nesterov=true")
METHODS = {
    "SGD, small batch": (SMALL, SGD, 0.1),
    "w/o LALR: SGD": (LARGE, SGD, 0.2),
    "LALR: LAMB": (LARGE, ("optimizer.name=lamb",), 0.05),
    "LALR: LAMB, modern preset": (
        LARGE,
        ("optimizer.name=lamb", "optimizer.preset=modern"),
        0.05,
    ),
    "LALR: LARS": (LARGE, ("optimizer.name=lars",), 0.05),
}
Run = Callable[[float, int], dict[str, Any]]


def tune(run: Run, start: float) -> dict[float, dict[str, Any]]:
    """Climb from `start` in factors of two until the held-out RA falls on both sides."""
    tried = {rate: run(rate, 0) for rate in (start / 2, start, start * 2)}
    while True:
        best = max(tried, key=lambda rate: tried[rate]["holdout_ra"])
        missing = [rate for rate in (best / 2, best * 2) if rate not in tried]
        if not missing:
            return tried
        tried[missing[0]] = run(missing[0], 0)


def measure(method: str, data: Path, seeds: int) -> dict[str, Any]:
    batch, settings, start = METHODS[method]

    def run(rate: float, seed: int) -> dict[str, Any]:
        fixed = (*settings, f"train.batch={batch}", f"data.name={data}", "comm.threads=1")
        return train(RECIPE, *fixed, f"optimizer.lr={rate:g}", f"seed={seed}")

    tried = tune(run, start)
    best = max(tried, key=lambda rate: tried[rate]["holdout_ra"])
    runs = [tried[best], *(run(best, seed) for seed in range(1, seeds))]
    return {"batch": batch, "lr": best, "tuning": tried, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        found = pool.map(lambda m: measure(m, arguments.data, arguments.seeds), METHODS)
        results = dict(zip(METHODS, found, strict=True))
    rows = [
        [
            method,
            str(result["batch"]),
            str(result["runs"][0]["steps"]),
            f"{result['lr']:g}",
            *(mean_and_spread([run[key] for run in result["runs"]]) for key in ("ta", "ra")),
        ]
        for method, result in results.items()
    ]
    headers = ["Method", "Batch", "Steps", "lr (tuned)", "TA (%)", "RA (%)"]
    save(Path(__file__), results, table(headers, rows))


if __name__ == "__main__":
    main()
