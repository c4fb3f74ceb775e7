"""Efficiency at a fixed share of images a worker: measured for 1 and 2 workers, predicted beyond.

    dat plan --calibrate
    python benchmarks/planner_scaling.py [--rounds 3]

Steps of the digits recipe with a larger network through `dat profile`, in turns, a core a worker;
medians over the rounds. Two workers are on one machine. Beyond that there is nothing here to
measure on: nodes of two workers with links of 1 and 10 Gbit/s between them, foreseen from the steps
of one worker and the costs of this machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from runs import save, table

from dat.distributed import Buckets
from dat.distributed.affinity import cores
from dat.models import build_model
from dat.tools.planning import Cluster, ComputeTimes, Costs, Gradient, NetworkLink, predict
from dat.tools.planning.costs import load
from dat.tools.planning.gradient import watch_backward
from dat.tools.planning.timing import compute_from_profile

SHARE, WIDTH = 256, 64
"""Images a worker, channels of the network."""
FORESEEN = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
WAYS = (("dense", 32), ("chunked", 8))
LINKS = ("1gbit", "10gbit")


def profile(workers: int) -> dict[str, Any]:
    settings = (f"model.width={WIDTH}", f"train.batch={SHARE * workers}", "attack.steps=10")
    command = [sys.executable, "-m", "dat", "profile", "digits", *settings, "comm.threads=1"]
    words = ("--workers", str(workers), "--steps", "8", "--json")
    done = subprocess.run([*command, *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return dict(json.loads(done.stdout))


def gradient() -> Gradient:
    model = build_model("cnn", 10, channels=1, width=WIDTH)
    x = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return watch_backward(model, x, lambda logits: logits.square().mean())


def foresee(compute: ComputeTimes, workers: int, way: tuple[str, int], link: str) -> float:
    """Efficiency on nodes of as many workers as there are cores here."""
    devices = min(workers, cores())
    cluster = Cluster(
        nodes=workers // devices,
        devices=devices,
        link=NetworkLink.named(link),
        inside=NetworkLink.named("unshaped", latency=0.0),
        cores=cores(),
    )
    found = predict(
        GRADIENT,
        compute,
        protocol=way[0],
        quantizer=Buckets(bits=way[1]),
        cluster=cluster,
        costs=COSTS,
    )
    return compute.total / found.step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    runs = [{workers: profile(workers) for workers in (1, 2)} for _ in range(rounds)]
    ratios = [run[1]["seconds"] / run[2]["seconds"] for run in runs]
    middle = sorted(runs, key=lambda run: float(run[1]["seconds"]))[len(runs) // 2]
    compute = compute_from_profile(middle[1])
    measured = {1: 1.0, 2: statistics.median(ratios)}
    rows: list[dict[str, Any]] = []
    for workers in FORESEEN:
        row: dict[str, Any] = {"workers": workers, "measured": measured.get(workers)}
        for way in WAYS:
            for link in LINKS:
                where = "unshaped" if workers <= cores() else link
                row[f"{way[0]}, {way[1]} bits, {link}"] = foresee(compute, workers, way, where)
        rows.append(row)
    names = [name for name in rows[0] if name not in ("workers", "measured")]
    lines = [
        [
            f"{row['workers']:,}",
            f"{100 * row['measured']:.0f} %" if row["measured"] else "",
            *(f"{100 * row[name]:.0f} %" for name in names),
        ]
        for row in rows
    ]
    headers = ["Workers", "Measured (dense)", *(f"Predicted: {name}" for name in names)]
    kept = {"rows": rows, "ratios": ratios, "costs": COSTS.origin, "step": vars(compute)}
    save(Path(__file__), kept, table(headers, lines))


GRADIENT: Gradient
COSTS: Costs

if __name__ == "__main__":
    GRADIENT, COSTS = gradient(), load()
    main()
