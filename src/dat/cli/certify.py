"""`dat certify`: the certified accuracy of a smoothed classifier."""

from __future__ import annotations

import argparse

from dat.cli.arguments import (
    Commands,
    float_list,
    images_argument,
    plot_argument,
    positive_int,
    quiet_argument,
    scientific_int,
    subject_arguments,
    workers_argument,
)
from dat.cli.subject import results_folder, settings_of, subject_of
from dat.cli.workers import starts_workers
from dat.jobs.launch import is_worker, launch


def add(commands: Commands) -> None:
    certify = commands.add(
        "certify",
        _certify,
        "certify the robustness of a smoothed classifier: certified accuracy (CA)",
        "  dat certify runs/smooth --radii 0.05,0.1,0.15,0.2,0.3 --workers 2\n"
        "  dat certify runs/smooth --fixed --images 100 --plot ca.png\n"
        "  dat certify --model mynets.small:Net --weights net.pt --data images.npz "
        "--sigma 0.25 \\\n      --radii 0.25,0.5\n"
        "With --radii, only these radii are tested, which takes far fewer samples.\n"
        "To resume an interrupted certification, run the same command again.",
    )
    _arguments(certify)


def _arguments(certify: argparse.ArgumentParser) -> None:
    certify.add_argument("mixed", nargs="*", metavar="RUN|key=value", help="a run folder; settings")
    certify.add_argument(
        "--sigma",
        type=float,
        help="standard deviation of the noise (default: the run's objective.sigma)",
    )
    certify.add_argument(
        "--radii",
        type=float_list,
        default=(),
        metavar="LIST",
        help="radii to certify, comma-separated, e.g. 0.05,0.1,0.15,0.2",
    )
    certify.add_argument(
        "--fixed",
        action="store_true",
        help="find the largest certified radius, with n samples for every image",
    )
    certify.add_argument(
        "--n",
        type=scientific_int,
        default=100_000,
        help="maximum number of samples per image (default: 1e5)",
    )
    certify.add_argument(
        "--n0", type=scientific_int, default=100, help="samples to select the class (default: 100)"
    )
    certify.add_argument(
        "--alpha", type=float, default=0.001, help="failure probability per image (default: 0.001)"
    )
    certify.add_argument(
        "--batch",
        type=positive_int,
        metavar="B",
        help="samples per batch (default: the fastest, as measured)",
    )
    subject_arguments(certify)
    images_argument(certify)
    workers_argument(certify)
    certify.add_argument(
        "--out",
        metavar="DIR",
        help="folder for the certificates, one line per image; none disables it "
        "(default: RUN/certificates)",
    )
    plot_argument(certify)
    quiet_argument(certify)


def _certify(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.config.model_spec import training_sigma
    from dat.config.schema import parse_edits
    from dat.report import check_picture, show_certified, warn

    subject = subject_of(arguments, parse_edits(settings_of(arguments)))
    sigma = arguments.sigma if arguments.sigma is not None else training_sigma(subject)
    if sigma is None:
        raise ValueError(
            "--sigma: this model was not trained with noise; specify its standard deviation, "
            "e.g. 0.25"
        )
    if arguments.plot:
        check_picture(arguments.plot)
    from dat.jobs.certify import Certification, certify_subject

    certification = Certification(
        sigma=sigma,
        seed=subject.config.seed,
        radii=arguments.radii,
        fixed=arguments.fixed or not arguments.radii,
        n0=arguments.n0,
        n=arguments.n,
        alpha=arguments.alpha,
        batch=arguments.batch,
    )
    if not is_worker():
        warn(certification.check())
    if starts_workers(arguments):
        return launch(arguments.workers, argv)
    folder = results_folder(arguments, subject, "certificates")
    result = certify_subject(subject, certification, folder, quiet=arguments.quiet)
    if result is not None:
        show_certified(result, as_json=arguments.json, plot=arguments.plot)
    return 0
