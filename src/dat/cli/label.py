"""`dat label`: pseudo-label unlabelled images."""

from __future__ import annotations

import argparse
from pathlib import Path

from dat.cli.arguments import (
    Commands,
    quiet_argument,
    trust_argument,
    weights_argument,
    workers_argument,
)
from dat.cli.workers import starts_workers
from dat.jobs.launch import launch


def add(commands: Commands) -> None:
    label = commands.add(
        "label",
        _label,
        "pseudo-label unlabelled images with a run's model",
        "  dat label runs/base --unlabelled pictures/ --out pseudo.npz\n"
        "  dat train my.yaml data.unlabelled=pictures/ data.pseudo_labels=pseudo.npz",
    )
    label.add_argument("mixed", nargs="+", metavar="RUN|key=value", help="a run folder; settings")
    label.add_argument(
        "--unlabelled",
        metavar="WHAT",
        help="rest (the images that the run's data.labels left out), a folder of images, an .npy "
        "or .npz file, or a dataset (default: the run's data.unlabelled)",
    )
    weights_argument(label)
    label.add_argument(
        "--out", type=Path, metavar="FILE", help="output file (default: RUN/pseudo.npz)"
    )
    workers_argument(label)
    trust_argument(label)
    quiet_argument(label)


def _label(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.config.model_spec import ModelSpec
    from dat.config.schema import parse_edits

    if len(arguments.runs) != 1:
        raise ValueError("specify one run folder, whose model labels the images")
    (run,) = arguments.runs
    option = [f"data.unlabelled={arguments.unlabelled}"] if arguments.unlabelled else []
    edits = parse_edits([*arguments.settings, *option])
    subject = ModelSpec.of_run(run, arguments.weights or "best", edits, trust=arguments.trust)
    if starts_workers(arguments):
        return launch(arguments.workers, argv)
    from dat.jobs.selftrain import PSEUDO, label
    from dat.report import show_labelled

    out = arguments.out or run / PSEUDO
    summary = label(subject, arguments.unlabelled, out, quiet=arguments.quiet)
    if summary is not None:
        show_labelled(summary, as_json=arguments.json)
    return 0
