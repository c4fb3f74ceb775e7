"""What a few bits cost in accuracy: adversarial training with every quantizer, one- and two-sided.

    python benchmarks/fashion.py fashion.npz
    python benchmarks/bits.py fashion.npz [--seeds 3] [--workers 4]

The task of fashion.yaml (Fashion-MNIST, a small CNN, PGD-3) at a batch of 300, LAMB at one learning
rate for all. One-sided: the workers quantize (gather). Two-sided: what they sum is quantized again
(chunked, and the paper's server). Data, initial weights and the attack's random numbers of a seed
are the same for all rows, so rows are compared seed by seed as well: the difference to 32 bits with
its 95 % interval (Student's t).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from runs import RESULTS, mean_and_spread, save, table, train
from scipy import stats

RECIPE = str(Path(__file__).with_name("fashion.yaml"))
FIXED = ("train.batch=300", "train.epochs=20", "train.select_every=5", "optimizer.lr=0.05")
ROWS = {
    "32 bits": (),
    "paper's text (vector), 8 bits, one-sided": (
        *("quantizer.name=vector", "quantizer.bits=8", "protocol.name=gather"),
    ),
    "paper's text (vector), 8 bits, two-sided": (
        *("quantizer.name=vector", "quantizer.bits=8", "protocol.name=server"),
    ),
    "paper's code (tensor), 8 bits, one-sided": (
        *("quantizer.name=tensor", "quantizer.bits=8", "protocol.name=gather"),
    ),
    "ours (bucket), 8 bits, one-sided": ("quantizer.bits=8", "protocol.name=gather"),
    "ours (bucket), 8 bits, two-sided": ("quantizer.bits=8", "protocol.name=chunked"),
    "ours (bucket), 4 bits, one-sided": ("quantizer.bits=4", "protocol.name=gather"),
    "ours (bucket), 4 bits, two-sided": ("quantizer.bits=4", "protocol.name=chunked"),
    "ours, 4 bits, two-sided, buckets of 128": (
        *("quantizer.bits=4", "protocol.name=chunked", "quantizer.size=128"),
    ),
    "ours, 4 bits, two-sided, error feedback": (
        *("quantizer.bits=4", "protocol.name=chunked"),
        *("quantizer.error_feedback=true", "quantizer.rounding=nearest"),
    ),
}


def difference(runs: list[dict[str, Any]], base: list[dict[str, Any]], key: str) -> str:
    """The mean difference, seed by seed, with its 95 % interval."""
    gaps = [run[key] - other[key] for run, other in zip(runs, base, strict=True)]
    if len(gaps) < 2:
        return f"{gaps[0]:+.1f}"
    width = stats.t.ppf(0.975, len(gaps) - 1) * statistics.stdev(gaps) / len(gaps) ** 0.5
    return f"{statistics.mean(gaps):+.1f} ± {width:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--fresh", action="store_true", help="do not go on with what there is")
    arguments = parser.parse_args()
    fixed = (*FIXED, f"data.name={arguments.data}", "comm.threads=1")
    kept = RESULTS / "bits.json"
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in ROWS}
    if kept.exists() and not arguments.fresh:
        results |= json.loads(kept.read_text())
    for seed in range(arguments.seeds):
        for name, settings in ROWS.items():
            if seed < len(results[name]):
                continue
            run = train(RECIPE, *fixed, *settings, f"seed={seed}", workers=arguments.workers)
            results[name].append(run)
    base = results["32 bits"]
    rows = [
        [
            name,
            mean_and_spread([run["ta"] for run in runs]),
            mean_and_spread([run["ra"] for run in runs]),
            *(difference(runs, base, key) if runs is not base else "" for key in ("ta", "ra")),
            f"{runs[0].get('mb_per_step', 0):.2f}",
        ]
        for name, runs in results.items()
    ]
    headers = ["Gradient", "TA (%)", "RA (%)", "TA - 32 bits", "RA - 32 bits", "MB/it"]
    save(Path(__file__), results, table(headers, rows))


if __name__ == "__main__":
    main()
