"""Catastrophic overfitting, seen and mended: FGSM with a large eps, with and without a rescue.

    python benchmarks/fashion.py fashion.npz
    python benchmarks/collapse.py fashion.npz [--seeds 3] [--plot collapse.png]

The task of methods.yaml at eps 0.25 with plain FGSM (a step of eps from the image itself, no random
start) and SGD. The same run is watched (`train.sentinel=warn`), rescued with N-FGSM, and trained
with PGD from the beginning.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from runs import RESULTS, dat, mean_and_spread, save, table

from dat.report import Chart, line_charts

RECIPE = str(Path(__file__).with_name("methods.yaml"))
TASK = ("threat.eps=0.25", "optimizer.name=sgd", "optimizer.lr=0.1", "schedule.name=constant")
LENGTH = ("train.epochs=15", "train.select_every=1", "train.select_steps=10", "comm.threads=1")
PLAIN = ("attack.name=fgsm", "attack.random_start=false", "attack.step_ratio=1")
RUNS = {
    "FGSM": (*PLAIN, "train.sentinel=warn"),
    "FGSM, rescued by N-FGSM": (*PLAIN, "train.sentinel=rescue"),
    "FGSM, rescued by PGD": (*PLAIN, "train.sentinel=rescue", "train.rescue=pgd"),
    "N-FGSM": ("attack.name=n-fgsm",),
}


def run(data: Path, seed: int, settings: tuple[str, ...]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        words = [RECIPE, f"data.name={data}", f"seed={seed}", *TASK, *LENGTH, *settings]
        found = dat("train", *words, "--out", f"{folder}/run")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        curve = [(it["epoch"], it["holdout_ra"]) for it in map(json.loads, lines)]
        return found | {"curve": curve}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", type=Path, default=RESULTS / "collapse.png")
    arguments = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in RUNS}
    for seed in range(arguments.seeds):
        for name, settings in RUNS.items():
            results[name].append(found := run(arguments.data, seed, settings))
            print(name, seed, found["ta"], found["ra"], found["collapses"], flush=True)
        _show(results, arguments.plot)


def _show(results: dict[str, list[dict[str, Any]]], plot: Path) -> None:
    rows = []
    for name, runs in results.items():
        cells = [mean_and_spread([it[key] for it in runs]) for key in ("ta", "ra")]
        last = mean_and_spread([it["last_holdout_ra"] for it in runs])
        seen = sum(bool(it["collapses"]) for it in runs)
        rows.append([f"{name} ({len(runs)})", str(seen), last, *cells])
    headers = ["Training (seeds)", "Collapsed", "Held-out RA at the end (%)", "TA (%)", "RA (%)"]
    save(Path(__file__), results, table(headers, rows))
    curves = {name: runs[0]["curve"] for name, runs in results.items()}
    lines = {name: ([e for e, _ in it], [ra for _, ra in it]) for name, it in curves.items()}
    line_charts(plot, [Chart(lines, x_axis="epoch", y_axis="RA (%), PGD-10, held out")])


if __name__ == "__main__":
    main()
