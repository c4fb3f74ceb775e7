"""What the benchmarks against other implementations share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from dat.cli.arguments import positive_int, str_list, timing_arguments

if TYPE_CHECKING:
    from dat.tools.bench import Comparison

WORKLOAD = ("model", "width", "batch", "size", "attack")
"""The arguments that describe the workload."""
TIMING = ("against", "repeats", "seconds", "threads")
"""The arguments that describe the measurement."""


def workload_arguments(parser: argparse.ArgumentParser, *, model: bool = True) -> None:
    if model:
        parser.add_argument(
            "--model", default="preact-resnet18", help="network (default: preact-resnet18)"
        )
    parser.add_argument(
        "--width",
        type=positive_int,
        default=16,
        metavar="N",
        help="channels of the network (default: 16)",
    )
    parser.add_argument(
        "--batch", type=positive_int, default=128, metavar="B", help="batch size (default: 128)"
    )
    parser.add_argument(
        "--size",
        type=positive_int,
        default=32,
        metavar="N",
        help="image size in pixels (default: 32)",
    )
    parser.add_argument(
        "--attack", default="pgd-10", help="fgsm, or pgd-N with N steps (default: pgd-10)"
    )


def comparison_arguments(parser: argparse.ArgumentParser, against: str) -> None:
    parser.add_argument(
        "--against",
        type=str_list,
        default=str_list(against),
        metavar="LIST",
        help=f"what to compare with, comma-separated (default: {against})",
    )
    timing_arguments(parser)
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.0,
        metavar="S",
        help="minimum duration of the measurement (default: 0)",
    )


def pick(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Some of the arguments, by name."""
    return {name: getattr(arguments, name) for name in names}


def check(arguments: argparse.Namespace, bench: str) -> None:
    """Refuse bad arguments before torch is imported."""
    from dat.report import check_picture
    from dat.tools.bench.baselines import check_baselines

    if arguments.plot:
        check_picture(arguments.plot)
    check_baselines(bench, arguments.against)


def show(arguments: argparse.Namespace, comparison: Comparison) -> int:
    from dat.tools.bench import show_comparison

    show_comparison(comparison, as_json=arguments.json, plot=arguments.plot)
    return 0
