"""Table 2 of the paper at desk scale: Smooth-AT with N = 2 and with N = 20 noisy copies.

    python benchmarks/fashion.py fashion.npz
    python benchmarks/smooth_copies.py fashion.npz [--seeds 3] [--images 300]

The task of smooth.yaml (Fashion-MNIST, a small CNN, PGD-2 in l2), trained and certified with the
same sigma, the same steps and the same learning rate for both N. Rows are compared seed by seed:
the difference with its 95 % interval (Student's t). It goes on with the results that there are.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from bits import difference
from runs import RESULTS, dat, mean_and_spread, save, table

RECIPE = str(Path(__file__).with_name("smooth.yaml"))
RADII = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
SIGMAS = (0.12, 0.25)
COPIES = (2, 20)


def run(data: Path, sigma: float, copies: int, seed: int, images: int) -> dict[str, Any]:
    """Train and certify; certified accuracies by radius, and what both cost."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/run"
        words = [RECIPE, f"data.name={data}", f"objective.sigma={sigma}", f"seed={seed}"]
        words += [f"objective.copies={copies}", "comm.threads=1", "--out", out]
        trained = dat("train", *words)
        radii = ",".join(map(str, RADII))
        certified = dat("certify", out, "--radii", radii, "--images", str(images))
    found = {f"{row['radius']:g}": row["ca"] for row in certified["ca"]}
    costs = {"train_seconds": trained["train_seconds"], "certify_seconds": certified["seconds"]}
    samples = {"samples_per_image": certified["samples_per_image"]}
    print(f"sigma {sigma}, N = {copies}, seed {seed}: {found}", flush=True)
    return found | costs | samples | {"acr": certified["acr"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed, to share the work")
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--sigmas", type=float, nargs="+", default=SIGMAS)
    arguments = parser.parse_args()
    kept = RESULTS / "smooth_copies.json"
    for seed in range(arguments.first, arguments.seeds):
        for sigma in arguments.sigmas:
            for copies in COPIES:
                results = json.loads(kept.read_text()) if kept.exists() else {}
                found = results.setdefault(f"sigma {sigma:g}, N = {copies}", {})
                if str(seed) not in found:
                    one = run(arguments.data, sigma, copies, seed, arguments.images)
                    results = json.loads(kept.read_text()) if kept.exists() else results
                    results.setdefault(f"sigma {sigma:g}, N = {copies}", {})[str(seed)] = one
                    _show(results)


def _show(results: dict[str, dict[str, dict[str, Any]]]) -> None:
    lines = []
    for name, found in sorted(results.items(), key=lambda item: _order(item[0])):
        runs = [found[seed] for seed in sorted(found)]
        cells = [mean_and_spread([one[f"{r:g}"] for one in runs]) for r in RADII]
        cells.append(f"{sum(one['train_seconds'] for one in runs) / len(runs):.0f}")
        lines.append([f"{name} ({len(runs)})", *cells])
        base = name.replace("N = 20", "N = 2")
        if base != name and set(results.get(base, {})) == set(found):
            before = [results[base][seed] for seed in sorted(found)]
            gaps = [difference(runs, before, f"{r:g}") for r in RADII]
            lines.append(["difference", *gaps, ""])
    headers = ["CA (%) (seeds)", *(f"r = {r:g}" for r in RADII), "Training (s)"]
    save(Path(__file__), results, table(headers, lines))


def _order(name: str) -> tuple[float, int]:
    sigma, copies = name.removeprefix("sigma ").split(", N = ")
    return float(sigma), int(copies)


if __name__ == "__main__":
    main()
