"""Commands that measure a model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dat.commands.arguments import (
    Commands,
    count,
    counts,
    images_argument,
    numbers,
    positive,
    subject_arguments,
    words_of,
    workers_argument,
)
from dat.commands.starting import starts_workers
from dat.files import WEIGHTS
from dat.launch import is_worker, launch

if TYPE_CHECKING:
    from dat.measure import Subject

STEPS = (1, 2, 5, 10, 20, 50, 100)
"""What a sweep goes over."""


def add(commands: Commands) -> None:
    _evaluate_arguments(
        commands.add(
            "evaluate",
            _evaluate,
            "measure a run, or anybody's model, under attack",
            "  dat evaluate runs/digits --attacks clean,pgd-20,autoattack --workers 2\n"
            "  dat evaluate runs/digits --attacks pgd-100x5,cw-100 threat.eps=0.1\n"
            "  dat evaluate --model mynets.small:Net --weights net.pt --data images.npz \\\n"
            "      --attacks autoattack threat.eps=8/255\n"
            "An evaluation that was interrupted goes on where it was when it is started again.",
        )
    )
    _sweep_arguments(
        commands.add(
            "sweep",
            _sweep,
            "RA over eps and over the steps of the attack, for several runs",
            "  dat sweep runs/standard runs/digits --plot sweep.png\n"
            "  dat sweep runs/digits --eps 0,0.1,0.2,0.3 --attack cw-50 --workers 2",
        )
    )
    _certify_arguments(
        commands.add(
            "certify",
            _certify,
            "prove robustness: certified accuracy (CA) of a smoothed classifier",
            "  dat certify runs/smooth --radii 0.05,0.1,0.15,0.2,0.3 --workers 2\n"
            "  dat certify runs/smooth --fixed --images 100 --plot ca.png\n"
            "  dat certify --model mynets.small:Net --weights net.pt --data images.npz "
            "--sigma 0.25 \\\n      --radii 0.25,0.5\n"
            "With --radii only whether each radius is reached is asked, which takes far fewer\n"
            "samples. A certification that was interrupted goes on when it is started again.",
        )
    )


def _evaluate_arguments(evaluate: argparse.ArgumentParser) -> None:
    evaluate.add_argument(
        "mixed", nargs="*", metavar="RUN|key=value", help="a run's folder; settings, threat.eps=0.1"
    )
    evaluate.add_argument(
        "--attacks",
        metavar="LIST",
        help="clean, fgsm, pgd-20, pgd-100x5 (five restarts), cw-20, pgd-dlr-20, apgd-ce, "
        "apgd-dlr, apgd-margin, apgd-t, fab-t, square, autoattack, autoattack-rand; several with "
        "commas (the run's own)",
    )
    subject_arguments(evaluate)
    images_argument(evaluate)
    workers_argument(evaluate)
    evaluate.add_argument(
        "--out",
        metavar="DIR",
        help="where verdicts are kept, to go on after an interruption; none keeps nothing "
        "(RUN/evaluations)",
    )
    evaluate.add_argument("--examples", action="store_true", help="keep adversarial examples there")
    evaluate.add_argument(
        "--no-checks", action="store_true", help="do not look for signs of false robustness"
    )
    evaluate.add_argument("--quiet", action="store_true", help="show no progress")


def _sweep_arguments(sweep: argparse.ArgumentParser) -> None:
    sweep.add_argument("mixed", nargs="+", metavar="RUN|key=value", help="runs' folders; settings")
    sweep.add_argument("--eps", type=words_of, metavar="LIST", help="e.g. 0,2/255,4/255,8/255")
    sweep.add_argument("--steps", type=counts, metavar="LIST", help="e.g. 1,10,20,50,100")
    sweep.add_argument("--attack", default="pgd-20", help="pgd-20, cw-20, apgd-ce-20 (pgd-20)")
    sweep.add_argument(
        "--weights", default="best", choices=WEIGHTS, help="which weights of the runs (best)"
    )
    sweep.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg or .pdf")
    images_argument(sweep)
    workers_argument(sweep)
    sweep.add_argument("--quiet", action="store_true", help="show no progress")


def _certify_arguments(certify: argparse.ArgumentParser) -> None:
    certify.add_argument(
        "mixed", nargs="*", metavar="RUN|key=value", help="a run's folder; settings"
    )
    certify.add_argument(
        "--sigma", type=float, help="standard deviation of the noise (the run's objective.sigma)"
    )
    certify.add_argument(
        "--radii", type=numbers, default=(), metavar="LIST", help="e.g. 0.05,0.1,0.15,0.2"
    )
    certify.add_argument(
        "--fixed", action="store_true", help="the whole radius, from n samples for every image"
    )
    certify.add_argument("--n", type=count, default=100_000, help="samples at most (1e5)")
    certify.add_argument("--n0", type=count, default=100, help="samples to choose the class (100)")
    certify.add_argument(
        "--alpha", type=float, default=0.001, help="chance of a false claim, for an image (0.001)"
    )
    certify.add_argument(
        "--batch", type=positive, metavar="B", help="samples at a time (the fastest, measured)"
    )
    subject_arguments(certify)
    images_argument(certify)
    workers_argument(certify)
    certify.add_argument(
        "--out",
        metavar="DIR",
        help="where certificates are kept, one line an image; none keeps nothing "
        "(RUN/certificates)",
    )
    certify.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg or .pdf")
    certify.add_argument("--quiet", action="store_true", help="show no progress")


def _evaluate(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.config import parse_edits

    settings = _settings(arguments)
    settings += [f"evaluate.attacks={arguments.attacks}"] if arguments.attacks else []
    subject = subject_of(arguments, parse_edits(settings))
    folder = _kept_in(arguments, subject, "evaluations")
    if arguments.examples and folder is None:
        raise ValueError("--examples: needs a folder to keep them in, not --out none")
    if starts_workers(arguments):
        return launch(arguments.workers, words)
    from dat.measure import measure
    from dat.report import show_measured

    found = measure(
        subject,
        folder,
        check=not arguments.no_checks,
        keep=arguments.examples,
        quiet=arguments.quiet,
    )
    if found is not None:
        show_measured(found, as_json=arguments.json)
    return 0


def _certify(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.config import parse_edits
    from dat.measure import Certification, certify_subject, own_sigma
    from dat.report import check_picture, show_certified, warn

    subject = subject_of(arguments, parse_edits(_settings(arguments)))
    sigma = arguments.sigma if arguments.sigma is not None else own_sigma(subject)
    if sigma is None:
        raise ValueError("--sigma: this model was not trained with noise; say how much, e.g. 0.25")
    asked = Certification(
        sigma=sigma,
        seed=subject.config.seed,
        radii=arguments.radii,
        fixed=arguments.fixed or not arguments.radii,
        n0=arguments.n0,
        n=arguments.n,
        alpha=arguments.alpha,
        batch=arguments.batch,
    )
    if arguments.plot:
        check_picture(arguments.plot)
    if not is_worker():
        warn(asked.check())
    if starts_workers(arguments):
        return launch(arguments.workers, words)
    folder = _kept_in(arguments, subject, "certificates")
    found = certify_subject(subject, asked, folder, quiet=arguments.quiet)
    if found is not None:
        show_certified(found, as_json=arguments.json, plot=arguments.plot)
    return 0


def _settings(arguments: argparse.Namespace) -> list[str]:
    """Settings as they were given, and those that have an option of their own."""
    settings = list(arguments.settings)
    settings += [f"evaluate.images={arguments.images}"] if arguments.images else []
    if arguments.data and not arguments.model:
        settings.append(f"data.name={arguments.data}")
    return settings


def subject_of(arguments: argparse.Namespace, edits: dict[str, Any]) -> Subject:
    """What is to be evaluated: a run, or a model of the user's."""
    from dat.measure import Subject

    if arguments.model:
        if arguments.runs:
            raise ValueError(f"{arguments.runs[0]}: give a run or --model, not both")
        if not arguments.data:
            raise ValueError("--model: also needs --data, the images to measure it on")
        weights = Path(arguments.weights) if arguments.weights else None
        return Subject.of_model(arguments.model, weights, arguments.data, edits)
    if len(arguments.runs) != 1:
        raise ValueError("give the folder of one run, or --model, --weights and --data")
    return Subject.of_run(arguments.runs[0], arguments.weights or "best", edits)


def _kept_in(arguments: argparse.Namespace, subject: Subject, kind: str) -> Path | None:
    """The folder for what is found; none if nothing is to be kept."""
    if arguments.out == "none":
        return None
    return Path(arguments.out) if arguments.out else subject.folder(kind)


def _sweep(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.config import parse_edits
    from dat.measure import Subject, default_eps, split_attack, sweep_all
    from dat.report import check_picture, show_sweep

    settings = list(arguments.settings)
    settings += [f"evaluate.images={arguments.images}"] if arguments.images else []
    edits = parse_edits(settings)
    if not arguments.runs:
        raise ValueError("give the folders of one or more runs")
    subjects = [Subject.of_run(run, arguments.weights, edits) for run in arguments.runs]
    attack, at_steps = split_attack(arguments.attack)
    if arguments.plot:
        check_picture(arguments.plot)
    eps, steps = _fractions(arguments.eps or ()), arguments.steps or ()
    if not eps and not steps:
        eps, steps = default_eps(subjects), STEPS
    if starts_workers(arguments):
        return launch(arguments.workers, words)
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
    """Radii as people write them: 8/255."""
    from dat.threat import ThreatModel

    try:
        return tuple(ThreatModel.read({"eps": word}).eps for word in words)
    except ValueError as error:
        raise ValueError(f"--{error}") from None
