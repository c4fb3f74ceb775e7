"""`dat verify`: check an evidence bundle, without attacking."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dat.cli.arguments import Commands, trust_argument, weights_argument
from dat.core.files import CONFIG

if TYPE_CHECKING:
    from dat.config.model_spec import ModelSpec
    from dat.config.schema import RunConfig

EXPORTED = "config.json"
FAILED = 1


def add(commands: Commands) -> None:
    verify = commands.add(
        "verify",
        _verify,
        "check an evidence bundle against a model and its data, without attacking",
        "  dat evaluate runs/digits --attacks autoattack --bundle digits.bundle\n"
        "  dat verify digits.bundle --model runs/digits\n"
        "  dat verify digits.bundle --model runs/digits/export/best --data digits\n"
        "  dat verify net.bundle --model mynets.small:Net --weights net.pt --data images.npz\n"
        "  dat verify digits.bundle --model runs/digits --robustbench submission\n"
        "The checks: the file is undamaged; the images and the weights are the same; the numbers\n"
        "add up; images are classified as claimed; every adversarial example is in the ball and\n"
        "in [0, 1], and is misclassified. The exit code is 1 if one of them fails.\n"
        "This proves that RA is at most the claimed one, not that other attacks fail as well.",
    )
    verify.add_argument("bundle", type=Path, metavar="FILE", help="written by dat evaluate")
    verify.add_argument(
        "settings", nargs="*", default=[], metavar="key=value", help="settings, e.g. data.name=..."
    )
    verify.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="a run folder, weights in a run folder, a folder written by dat export, timm/NAME, "
        "torchvision/NAME, hf/NAME, or package.module:factory",
    )
    weights_argument(verify)
    verify.add_argument(
        "--data",
        metavar="NAME",
        help="a dataset, an .npz file, or package.module:function (default: the run's)",
    )
    verify.add_argument(
        "--robustbench",
        type=Path,
        metavar="DIR",
        help="if all checks pass, write a submission to RobustBench: the adversarial images as "
        "a .pt tensor, and the claim as JSON",
    )
    trust_argument(verify)


def _verify(arguments: argparse.Namespace, argv: list[str]) -> int:
    if not arguments.bundle.is_file():
        raise ValueError(f"{arguments.bundle}: no such bundle")
    subject, config = _subject(arguments)
    from dat.jobs.verify import verify_bundle
    from dat.report import show_verification

    report = verify_bundle(arguments.bundle, subject, config, submission=arguments.robustbench)
    show_verification(report, as_json=arguments.json)
    return 0 if report["passed"] else FAILED


def _subject(arguments: argparse.Namespace) -> tuple[ModelSpec | Path, RunConfig]:
    """The model, or the folder of an exported one, and the settings of the data."""
    from dat.config.model_spec import ModelSpec
    from dat.config.schema import RunConfig, parse_edits

    path, weights = Path(arguments.model), arguments.weights
    data = [f"data.name={arguments.data}"] if arguments.data else []
    edits: dict[str, Any] = parse_edits([*arguments.settings, *data])
    if path.is_file() and (path.parent / CONFIG).is_file() and not weights:
        path, weights = path.parent, str(path)
    if (path / CONFIG).is_file():
        spec = ModelSpec.of_run(path, weights or "best", edits, trust=arguments.trust)
        return spec, spec.config
    if not arguments.data:
        raise ValueError("--model: requires --data, the images that were evaluated")
    if (path / EXPORTED).is_file():
        return path, RunConfig.read(edits)
    file = Path(weights) if weights else None
    spec = ModelSpec.of_model(arguments.model, file, arguments.data, edits)
    return spec, spec.config
