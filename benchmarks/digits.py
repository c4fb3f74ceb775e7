"""Standard training beside DAT-PGD and DAT-FGSM on digits: the README's table.

    python benchmarks/digits.py [--seeds 3] [--workers 2]

Runs the three recipes for each seed and writes benchmarks/results/digits.json and digits.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from runs import mean_and_spread, save, table, train

RECIPES = ("digits-standard", "digits", "digits-fgsm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    results = {
        recipe: [
            train(recipe, f"seed={seed}", workers=arguments.workers)
            for seed in range(arguments.seeds)
        ]
        for recipe in RECIPES
    }
    columns = {
        "TA (%)": "ta",
        "RA (%)": "ra",
        "C (s)": "comm_seconds_per_epoch",
        "T (s)": "train_seconds_per_epoch",
        "MB/it": "mb_per_step",
    }
    rows = [
        [
            runs[0]["method"],
            *(mean_and_spread([run[key] for run in runs]) for key in columns.values()),
        ]
        for runs in results.values()
    ]
    save(Path(__file__), results, table(["Method", *columns], rows))


if __name__ == "__main__":
    main()
