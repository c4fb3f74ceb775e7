"""Batches of CIFAR-10, cropped and flipped: `dat bench loader`, and beside it what training takes.

    dat data fetch cifar10
    python benchmarks/loader.py [--batch 128] [--repeats 7]

The last rows are what a training step consumes, the fastest first: a clean forward and backward
pass of small networks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from runs import save, table
from torch.nn import functional as F

from dat.models import build_model
from dat.tools.bench import bench_loader
from dat.tools.bench.timing import take_turns

NETWORKS = (("cnn", 8), ("cnn", 32), ("preact-resnet18", 16))


def load_rates(batch: int, repeats: int, against: tuple[str, ...] = ()) -> dict[str, float]:
    timings = bench_loader(against, data="cifar10", batch=batch, repeats=repeats, threads=1)
    return {row["name"]: row["images_per_second"] for row in timings.rows()}


def step_rate(name: str, width: int, batch: int) -> float:
    """Images a second through a forward and a backward pass."""
    model = build_model(name, 10, width=width)
    x, y = torch.rand(batch, 3, 32, 32), torch.zeros(batch, dtype=torch.int64)
    jobs = {name: lambda: F.cross_entropy(model(x), y).backward()}
    return batch / take_turns(jobs, repeats=5)[name].median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    batch, repeats = arguments.batch, arguments.repeats
    found = load_rates(batch, repeats, ("dataloader", "dataloader-2"))
    rates = {
        f"ours, batches of {batch}": found["ours"],
        "ours, batches of 1,024": load_rates(1024, repeats)["ours"],
        "DataLoader, in the process": found["dataloader"],
        "DataLoader, 2 processes": found["dataloader-2"],
    }
    for name, width in NETWORKS:
        rates[f"training step, {name} of width {width}"] = step_rate(name, width, batch)
    rows = [[name, f"{it:,.0f}", f"{found['ours'] / it:.1f}"] for name, it in rates.items()]
    save(Path(__file__), rates, table(["Way", "Images/s", "Speedup of ours"], rows))


if __name__ == "__main__":
    main()
