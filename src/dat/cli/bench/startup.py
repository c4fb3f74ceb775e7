"""`dat bench startup`: the time until a command does something."""

from __future__ import annotations

import argparse

from dat.cli.arguments import Commands
from dat.cli.bench.comparison import TIMING, check, comparison_arguments, pick, show


def add(bench: Commands) -> None:
    startup = bench.add(
        "startup",
        _startup,
        "benchmark startup: import torch, import dat, dat --help, dat train",
        "  dat bench startup --repeats 10\n  dat bench startup --against dat,help",
    )
    comparison_arguments(startup, "torch,dat,help,train")


def _startup(arguments: argparse.Namespace, argv: list[str]) -> int:
    check(arguments, "startup")
    from dat.tools.bench import bench_startup

    return show(arguments, bench_startup(**pick(arguments, *TIMING)))
