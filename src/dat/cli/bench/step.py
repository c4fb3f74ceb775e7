"""`dat bench step`: the throughput and memory of a training step."""

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
    step = bench.add(
        "step",
        _step,
        "benchmark a step of adversarial training: throughput, memory, overhead",
        "  dat bench step\n"
        "  dat bench step --attack fgsm --width 64 --batch 64\n"
        "  dat bench step --clean --against bare,paper     with the clean loss, as in the paper",
    )
    workload_arguments(step)
    step.add_argument("--clean", action="store_true", help="also train on the clean images")
    step.add_argument("--no-memory", action="store_true", help="do not measure memory")
    comparison_arguments(step, "bare,plain,paper")


def _step(arguments: argparse.Namespace, argv: list[str]) -> int:
    check(arguments, "step")
    from dat.tools.bench import StepWorkload, bench_step

    workload = StepWorkload(**pick(arguments, *WORKLOAD, "clean"))
    comparison = bench_step(
        workload, measure_memory=not arguments.no_memory, **pick(arguments, *TIMING)
    )
    return show(arguments, comparison)
