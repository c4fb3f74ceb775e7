"""One worker on two cores, and two workers on one core each: the same global batch.

    python benchmarks/first_images.py cifar10 cifar15k.npz --train 15000 --test 2000
    python benchmarks/scaling.py cifar15k.npz [--rounds 5]

Steps of the recipe in cifar.yaml through `dat profile`, in turns; medians over the rounds. One core
with one thread gives what two cores could do at best: twice that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from runs import save, table

RECIPE = str(Path(__file__).with_name("cifar.yaml"))
LAYOUTS = {
    "1 worker, 1 thread": ("comm.threads=1", "train.batch=64", "--workers", "1"),
    "1 worker, 2 threads": ("comm.threads=2", "--workers", "1"),
    "2 workers, 1 thread each": ("comm.threads=1", "--workers", "2"),
    "2 workers, 1 thread each, bound to cores": (
        *("comm.threads=1", "comm.pin=true", "--workers", "2"),
    ),
}
ATTACKS = {"PGD-10": ("attack=pgd", "attack.steps=10"), "FGSM": ("attack=fgsm",)}


def profile(data: str, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "dat", "profile", RECIPE, f"data.name={data}", *words]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"recipe": Path(RECIPE).name}  # wherever it lies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="images as an .npz file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(arguments.rounds):
        for attack, settings in ATTACKS.items():
            for layout, words in LAYOUTS.items():
                steps = ("--steps", str(arguments.steps))
                one = profile(arguments.data, *settings, *words, *steps)
                found.setdefault(f"{attack}: {layout}", []).append(one)
                print(f"{attack}: {layout}: {one['images_per_second']:.1f} img/s", flush=True)
    rows = []
    for attack in ATTACKS:
        told = {layout: found[f"{attack}: {layout}"] for layout in LAYOUTS}
        speeds = {
            layout: statistics.median(it["images_per_second"] for it in runs)
            for layout, runs in told.items()
        }
        best = 2 * speeds["1 worker, 1 thread"]
        for layout, speed in speeds.items():
            share = "" if layout == "1 worker, 1 thread" else f"{100 * speed / best:.0f} %"
            waited = statistics.median(
                sum(stage["share"] for stage in it["stages"] if stage["stage"] == "exchange")
                for it in told[layout]
            )
            rows.append([attack, layout, f"{speed:.1f}", share, f"{100 * waited:.1f} %"])
    headers = [
        "Attack",
        "Workers",
        "Images/s",
        "Share of twice one thread",
        "Waiting for the exchange",
    ]
    save(Path(__file__), found, table(headers, rows))


if __name__ == "__main__":
    main()
