"""Every way to train, on one task: what it costs and what it gives.

    python benchmarks/fashion.py fashion.npz
    python benchmarks/methods.py fashion.npz [--seeds 2]

The task of methods.yaml (Fashion-MNIST, a small CNN, eps 0.1), the same optimizer and the same
number of updates for all: free AT has fewer epochs, as it replays each batch. Gradients counts
passes of one image through the network, forward and backward, in one update with its attack; YOPO's
passes through the first layer and GradAlign's second derivative are not counted. It goes on
with the results that there are.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from runs import RESULTS, mean_and_spread, save, table, train

RECIPE = str(Path(__file__).with_name("methods.yaml"))
METHODS: dict[str, tuple[int, tuple[str, ...]]] = {
    "Standard": (1, ("attack.name=none", "train.select_by=ta")),
    "AT, PGD-5": (6, ()),
    "AT, PGD-10": (11, ("attack.steps=10",)),
    "Fast AT (FGSM)": (2, ("attack.name=fgsm",)),
    "Free AT, m = 5": (1, ("attack.name=free", "attack.replays=5", "train.epochs=2")),
    "YOPO-3-3": (4, ("attack.name=yopo", "attack.steps=3", "attack.inner=3")),
    "N-FGSM": (2, ("attack.name=n-fgsm",)),
    "GradAlign, FGSM": (4, ("attack.name=fgsm", "objective.name=gradalign")),
    "TRADES, beta 6, PGD-5": (7, ("objective.name=trades",)),
    "MART, beta 5, PGD-5": (7, ("objective.name=mart",)),
    "Logit pairing, PGD-5": (7, ("objective.name=alp",)),
    "AT + AWP, PGD-5": (7, ("train.awp=0.005", "train.awp_warmup=2")),
    "TRADES + AWP, PGD-5": (9, ("objective.name=trades", "train.awp=0.005")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    kept = RESULTS / "methods.json"
    results: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    for seed in range(arguments.seeds):
        for name, (_, settings) in METHODS.items():
            found = results.setdefault(name, {})
            if str(seed) not in found:
                words = (f"data.name={arguments.data}", f"seed={seed}", "comm.threads=1")
                found[str(seed)] = train(RECIPE, *words, *settings)
                _show(results)


def _show(results: dict[str, dict[str, Any]]) -> None:
    rows = []
    for name, (cost, _) in METHODS.items():
        runs = list(results.get(name, {}).values())
        if runs:
            cells = [mean_and_spread([run[key] for run in runs]) for key in ("ta", "ra")]
            updates = statistics.mean(run["steps"] for run in runs)
            seconds = statistics.mean(run["train_seconds"] for run in runs)
            costs = [str(cost), f"{updates:.0f}", f"{seconds:.0f}"]
            rows.append([f"{name} ({len(runs)})", *costs, *cells])
    headers = ["Method (seeds)", "Gradients", "Updates", "Training (s)", "TA (%)", "RA (%)"]
    save(Path(__file__), results, table(headers, rows))


if __name__ == "__main__":
    main()
