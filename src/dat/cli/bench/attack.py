"""`dat bench attack`: the throughput of PGD."""

from __future__ import annotations

import argparse

from dat.cli.arguments import Commands
from dat.cli.bench.comparison import (
    TIMING,
    WORKLOAD,
    check,
    comparison_arguments,
    pick,
    show,
    workload_arguments,
)


def add(bench: Commands) -> None:
    attack = bench.add(
        "attack",
        _attack,
        "benchmark PGD against a plain loop, torchattacks, foolbox and ART",
        "  dat bench attack --against plain,torchattacks,foolbox,art\n"
        "  dat bench attack --width 64 --batch 64 --plot attack.png",
    )
    workload_arguments(attack)
    comparison_arguments(attack, "plain")


def _attack(arguments: argparse.Namespace, argv: list[str]) -> int:
    check(arguments, "attack")
    from dat.tools.bench import Workload, bench_attack

    workload = Workload(**pick(arguments, *WORKLOAD))
    return show(arguments, bench_attack(workload, **pick(arguments, *TIMING)))
