"""Large batches with and without LALR: a first measurement on Fashion-MNIST.

    python benchmarks/large_batch.py fashion.npz [--seeds 3] [--workers 2]

Of 4,500 training images a batch of 1,125 leaves 4 steps an epoch, where 64 gives 70. For each
method the learning rate is chosen from a grid by the RA on held-out images with seed 0; then the
chosen rate is run with every seed and measured on the test images. Same epochs, same attack, same
schedule for all; the small-batch baseline is what the large batch should not fall behind.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from runs import mean_and_spread, save, table, train

RECIPE = str(Path(__file__).with_name("fashion.yaml"))
SMALL, LARGE = 64, 1125
METHODS = {
    "SGD, batch 64": (SMALL, ("optimizer.name=sgd", "optimizer.nesterov=true"), (0.02, 0.05, 0.1)),
    "DAT-PGD w/o LALR (SGD)": (
        LARGE,
        ("optimizer.name=sgd", "optimizer.nesterov=true"),
        (0.05, 0.1, 0.2, 0.4),
    ),
    "DAT-PGD (LAMB)": (LARGE, ("optimizer.name=lamb",), (0.02, 0.05, 0.1, 0.2)),
    "DAT-PGD (LARS)": (LARGE, ("optimizer.name=lars",), (0.05, 0.1, 0.2, 0.4)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    results, rows = {}, []
    for method, (batch, settings, grid) in METHODS.items():
        common = (*settings, f"train.batch={batch}", f"data.name={arguments.data}")

        def run(rate: float, seed: int, common: tuple[str, ...] = common) -> dict[str, Any]:
            settings = (*common, f"optimizer.lr={rate}", f"seed={seed}")
            return train(RECIPE, *settings, workers=arguments.workers)

        tuning = {rate: run(rate, 0) for rate in grid}
        best = max(grid, key=lambda rate: tuning[rate]["holdout_ra"])
        runs = [tuning[best], *(run(best, seed) for seed in range(1, arguments.seeds))]
        results[method] = {"tuning": tuning, "chosen": best, "runs": runs}
        accuracy = [mean_and_spread([r[key] for r in runs]) for key in ("ta", "ra")]
        rows.append([method, str(batch), str(runs[0]["steps"]), f"{best:g}", *accuracy])
    headers = ["Method", "Batch", "Steps", "lr (tuned)", "TA (%)", "RA (%)"]
    save(Path(__file__), results, table(headers, rows))


if __name__ == "__main__":
    main()
