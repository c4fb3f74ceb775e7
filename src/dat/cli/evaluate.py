"""`dat evaluate`: TA and RA of a run, or of any model."""

from __future__ import annotations

import argparse
from pathlib import Path

from dat.cli.arguments import (
    Commands,
    images_argument,
    quiet_argument,
    subject_arguments,
    workers_argument,
)
from dat.cli.subject import results_folder, settings_of, subject_of
from dat.cli.workers import starts_workers
from dat.jobs.launch import launch


def add(commands: Commands) -> None:
    evaluate = commands.add(
        "evaluate",
        _evaluate,
        "evaluate the clean accuracy (TA) and robust accuracy (RA) of a run or any model",
        "  dat evaluate runs/digits --attacks clean,pgd-20,autoattack --workers 2\n"
        "  dat evaluate runs/digits --attacks pgd-100x5,cw-100 threat.eps=0.1\n"
        "  dat evaluate --model mynets.small:Net --weights net.pt --data images.npz \\\n"
        "      --attacks autoattack threat.eps=8/255\n"
        "  dat evaluate runs/digits --attacks autoattack --bundle digits.bundle\n"
        "To resume an interrupted evaluation, run the same command again.",
    )
    evaluate.add_argument(
        "mixed",
        nargs="*",
        metavar="RUN|key=value",
        help="a run folder; settings, e.g. threat.eps=0.1",
    )
    evaluate.add_argument(
        "--attacks",
        metavar="LIST",
        help="comma-separated: clean, fgsm, pgd-20, pgd-100x5 (five restarts), cw-20, pgd-dlr-20, "
        "apgd-ce, apgd-dlr, apgd-margin, apgd-t, fab-t, square, autoattack, autoattack-rand "
        "(default: the run's evaluate.attacks)",
    )
    subject_arguments(evaluate)
    images_argument(evaluate)
    workers_argument(evaluate)
    evaluate.add_argument(
        "--out",
        metavar="DIR",
        help="folder for the results, which an interrupted evaluation resumes from; none disables "
        "it (default: RUN/evaluations)",
    )
    evaluate.add_argument(
        "--examples", action="store_true", help="also save the adversarial examples"
    )
    evaluate.add_argument(
        "--bundle",
        type=Path,
        metavar="FILE",
        help="write the evidence for the result, which dat verify checks: the images' hashes, "
        "which attack broke which image, the adversarial examples, the weights' hash",
    )
    evaluate.add_argument(
        "--no-checks", action="store_true", help="skip the checks for gradient masking"
    )
    quiet_argument(evaluate)


def _evaluate(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.config.schema import parse_edits

    settings = settings_of(arguments)
    settings += [f"evaluate.attacks={arguments.attacks}"] if arguments.attacks else []
    subject = subject_of(arguments, parse_edits(settings))
    folder = results_folder(arguments, subject, "evaluations")
    if arguments.examples and folder is None:
        raise ValueError("--examples: requires a folder, not --out none")
    if starts_workers(arguments):
        return launch(arguments.workers, argv)
    from dat.jobs.evaluate import measure
    from dat.report import show_evaluation

    result = measure(
        subject,
        folder,
        check=not arguments.no_checks,
        keep=arguments.examples,
        bundle=arguments.bundle,
        quiet=arguments.quiet,
    )
    if result is not None:
        show_evaluation(result, as_json=arguments.json)
        if arguments.bundle and not arguments.json:
            print(f"\nEvidence: {arguments.bundle}. {_hint(arguments)}")
    return 0


def _hint(arguments: argparse.Namespace) -> str:
    """How to check the bundle."""
    words = ["dat verify", arguments.bundle, "--model", arguments.model or arguments.runs[0]]
    words += ["--weights", arguments.weights] if arguments.weights else []
    words += ["--data", arguments.data] if arguments.data else []
    return f"To check it: {' '.join(map(str, words))}"
