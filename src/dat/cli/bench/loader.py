"""`dat bench loader`: the time to load augmented batches."""

from __future__ import annotations

import argparse

from dat.cli.arguments import Commands, positive_int, scientific_int
from dat.cli.bench.comparison import TIMING, check, comparison_arguments, pick, show


def add(bench: Commands) -> None:
    loader = bench.add(
        "loader",
        _loader,
        "benchmark batches with random crops and flips against torch's DataLoader",
        "  dat bench loader --data cifar10\n  dat bench loader --batch 1024 --threads 1",
    )
    loader.add_argument(
        "--batch", type=positive_int, default=128, metavar="B", help="batch size (default: 128)"
    )
    loader.add_argument("--data", metavar="NAME", help="a dataset (default: random images)")
    loader.add_argument(
        "--images",
        type=scientific_int,
        default=10_000,
        metavar="N",
        help="number of random images (default: 1e4)",
    )
    comparison_arguments(loader, "dataloader,dataloader-2")


def _loader(arguments: argparse.Namespace, argv: list[str]) -> int:
    check(arguments, "loader")
    from dat.tools.bench import bench_loader

    return show(arguments, bench_loader(**pick(arguments, "batch", "data", "images", *TIMING)))
