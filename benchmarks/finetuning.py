"""Figure 4 of the paper at desk scale: three epochs from a robust model against three from scratch.

    python benchmarks/fashion.py fashion.npz
    python benchmarks/first_images.py mnist mnist.npz --train 1000 --test 1000
    python benchmarks/finetuning.py fashion.npz mnist.npz [--seeds 3] [--plot finetuning.png]

A small CNN is trained robustly on 5,000 Fashion-MNIST images (methods.yaml: PGD-5, eps 0.1), then
fine-tuned robustly for three epochs on 1,000 MNIST images and on scikit-learn's digits, whose 8 x 8
pixels are up-sampled to 28 x 28 inside the model. From scratch the same network and recipe, for
three epochs and for twelve.
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
SHORT = ("train.batch=50", "train.select_every=1", "comm.threads=1", "data.holdout=0.15")
WAYS = {"fine-tuned": 3, "from scratch": 3, "from scratch, longer": 12}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fashion", type=Path)
    parser.add_argument("mnist", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", type=Path, default=RESULTS / "finetuning.png")
    arguments = parser.parse_args()
    tasks = {"MNIST, 1,000 images": str(arguments.mnist), "digits, 8 x 8": "digits"}
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        base = f"{folder}/base"
        dat("train", RECIPE, f"data.name={arguments.fashion}", "comm.threads=1", "--out", base)
        for seed in range(arguments.seeds):
            for task, data in tasks.items():
                for way, epochs in WAYS.items():
                    out = f"{folder}/{len(results)}-{seed}-{task[:5]}-{way}"
                    own = (*SHORT, f"data.name={data}", f"seed={seed}", f"train.epochs={epochs}")
                    start = (
                        ("finetune", base, RECIPE) if epochs == 3 and way == "fine-tuned" else ()
                    )
                    found = dat(*(start or ("train", RECIPE)), *own, "--out", out)
                    lines = (Path(out) / "metrics.jsonl").read_text().splitlines()
                    found["curve"] = [json.loads(line)["holdout_ra"] for line in lines]
                    results.setdefault(f"{task}: {way}", []).append(found)
                    print(task, way, seed, found["ta"], found["ra"], flush=True)
            _show(results, tasks, arguments.plot)


def _show(results: dict[str, list[dict[str, Any]]], tasks: dict[str, str], plot: Path) -> None:
    rows = []
    for name, runs in results.items():
        cells = [mean_and_spread([run[key] for run in runs]) for key in ("ta", "ra")]
        rows.append([f"{name} ({len(runs)})", str(runs[0]["epochs"]), *cells])
    headers = ["Task, start (seeds)", "Epochs", "TA (%)", "RA (%)"]
    save(Path(__file__), results, table(headers, rows))
    charts = []
    for task in tasks:
        lines = {}
        for way in WAYS:
            curves = [run["curve"] for run in results[f"{task}: {way}"]]
            means = [sum(points) / len(points) for points in zip(*curves, strict=True)]
            lines[way] = (list(range(1, len(means) + 1)), means)
        del lines["from scratch"]  # the longer run's beginning, but for its schedule
        charts.append(Chart(lines, x_axis=f"epoch, {task}", y_axis="held-out RA (%)"))
    line_charts(plot, charts)


if __name__ == "__main__":
    main()
