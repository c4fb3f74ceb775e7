"""`dat bench optimizer`: the time of an optimizer step."""

from __future__ import annotations

import argparse

from dat.cli.arguments import Commands, positive_int
from dat.cli.bench.comparison import TIMING, check, comparison_arguments, pick, show


def add(bench: Commands) -> None:
    optimizer = bench.add(
        "optimizer",
        _optimizer,
        "benchmark LAMB and LARS against torch's AdamW and SGD, Muon, timm and pytorch_optimizer",
        "  dat bench optimizer --against adamw,sgd,muon,timm,pytorch_optimizer",
    )
    optimizer.add_argument(
        "--model", default="resnet50", help="network whose parameters to update (default: resnet50)"
    )
    optimizer.add_argument(
        "--width",
        type=positive_int,
        metavar="N",
        help="channels of the network (default: the network's own)",
    )
    comparison_arguments(optimizer, "adamw,sgd")


def _optimizer(arguments: argparse.Namespace, argv: list[str]) -> int:
    check(arguments, "optimizer")
    from dat.tools.bench import bench_optimizer

    return show(arguments, bench_optimizer(**pick(arguments, "model", "width", *TIMING)))
