"""`dat bench evaluate`: the time of an evaluation."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from dat.cli.arguments import Commands, images_argument, subject_arguments
from dat.cli.bench.comparison import (
    TIMING,
    check,
    comparison_arguments,
    pick,
    show,
    workload_arguments,
)

if TYPE_CHECKING:
    from torch import nn

    from dat.data import ImageData


def add(bench: Commands) -> None:
    evaluate = bench.add(
        "evaluate",
        _evaluate,
        "benchmark the evaluation of a run, a model or an untrained network",
        "  dat bench evaluate --images 512\n"
        "  dat bench evaluate runs/cifar --images 1000 --attack pgd-20",
    )
    evaluate.add_argument(
        "mixed", nargs="*", metavar="RUN|key=value", help="a run folder; settings"
    )
    subject_arguments(evaluate)
    images_argument(evaluate)
    workload_arguments(evaluate, model=False)
    comparison_arguments(evaluate, "plain")


def _evaluate(arguments: argparse.Namespace, argv: list[str]) -> int:
    check(arguments, "evaluate")
    from dat.tools.bench import Workload, bench_evaluate

    settings = pick(arguments, "width", "batch", "size", "attack")
    subject = None
    if arguments.mixed or arguments.model or arguments.data:
        subject, properties = _subject(arguments)
        settings |= properties
    options = pick(arguments, "images", *TIMING)
    return show(arguments, bench_evaluate(Workload(**settings), subject=subject, **options))


def _subject(
    arguments: argparse.Namespace,
) -> tuple[tuple[nn.Module, ImageData], dict[str, Any]]:
    """A model and its test images, and the properties of both that a workload has."""
    from dat.cli.subject import subject_of
    from dat.config.schema import parse_edits
    from dat.data import load
    from dat.objectives import Noisy

    subject = subject_of(arguments, parse_edits(arguments.settings))
    config = subject.config
    if isinstance(config.objective, Noisy):
        raise ValueError(f"{subject.name}: smoothed classifiers are not supported here")
    if config.threat.norm != "linf":
        raise ValueError(f"{subject.name}: threat.norm must be linf, as in the plain loop")
    data = load(config.data.name, config.data.reading())
    properties = {
        "model": config.model.name,
        "width": config.model.width,
        "size": data.test.shape[1],
        "eps": config.threat.eps,
    }
    return (subject.make(data), data.test), properties
