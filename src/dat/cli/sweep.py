"""`dat sweep`: RA over eps and over attack steps."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from dat.cli.arguments import (
    Commands,
    images_argument,
    int_list,
    plot_argument,
    quiet_argument,
    str_list,
    trust_argument,
    workers_argument,
)
from dat.cli.workers import starts_workers
from dat.core.files import WEIGHTS
from dat.jobs.launch import launch

STEPS = (1, 2, 5, 10, 20, 50, 100)
"""The default attack steps."""


def add(commands: Commands) -> None:
    sweep = commands.add(
        "sweep",
        _sweep,
        "measure robust accuracy (RA) over eps and over attack steps, for one or more runs",
        "  dat sweep runs/standard runs/digits --plot sweep.png\n"
        "  dat sweep runs/digits --eps 0,0.1,0.2,0.3 --attack cw-50 --workers 2\n"
        "Without --eps and --steps, eps goes up to twice that of the first run, and steps\n"
        "from 1 to 100.",
    )
    sweep.add_argument("mixed", nargs="+", metavar="RUN|key=value", help="run folders; settings")
    sweep.add_argument(
        "--eps", type=str_list, metavar="LIST", help="comma-separated, e.g. 0,2/255,4/255,8/255"
    )
    sweep.add_argument(
        "--steps", type=int_list, metavar="LIST", help="comma-separated, e.g. 1,10,20,50,100"
    )
    sweep.add_argument(
        "--attack",
        default="pgd-20",
        help="attack and number of steps, e.g. cw-20 or apgd-ce-20 (default: pgd-20)",
    )
    sweep.add_argument(
        "--weights", default="best", choices=WEIGHTS, help="weights of the runs (default: best)"
    )
    trust_argument(sweep)
    plot_argument(sweep)
    images_argument(sweep)
    workers_argument(sweep)
    quiet_argument(sweep)


def _sweep(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.attacks.suites import split_attack
    from dat.config.model_spec import ModelSpec
    from dat.config.schema import parse_edits
    from dat.report import check_picture, show_sweep

    settings = list(arguments.settings)
    settings += [f"evaluate.images={arguments.images}"] if arguments.images else []
    edits = parse_edits(settings)
    if not arguments.runs:
        raise ValueError("specify one or more run folders")
    subjects = [
        ModelSpec.of_run(run, arguments.weights, edits, trust=arguments.trust)
        for run in arguments.runs
    ]
    attack, at_steps = split_attack(arguments.attack)
    if arguments.plot:
        check_picture(arguments.plot)
    eps, steps = _fractions(arguments.eps or ()), arguments.steps or ()
    from dat.jobs.sweep import default_eps, sweep_all

    if not eps and not steps:
        eps, steps = default_eps(subjects), STEPS
    if starts_workers(arguments):
        return launch(arguments.workers, argv)
    swept = sweep_all(
        subjects, eps=eps, steps=steps, attack=attack, at_steps=at_steps, quiet=arguments.quiet
    )
    if swept is not None:
        show_sweep(
            swept.curves,
            swept.warnings,
            attack=arguments.attack,
            as_json=arguments.json,
            plot=arguments.plot,
        )
    return 0


def _fractions(words: Sequence[str]) -> tuple[float, ...]:
    """Radii, which may be fractions: 8/255."""
    from dat.core.threat import ThreatModel

    try:
        return tuple(ThreatModel.read({"eps": word}).eps for word in words)
    except ValueError as error:
        raise ValueError(f"--{error}") from None
