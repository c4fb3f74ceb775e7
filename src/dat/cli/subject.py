"""What `dat evaluate`, `dat certify` and `dat bench evaluate` share: the model they evaluate."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dat.config.model_spec import ModelSpec


def subject_of(arguments: argparse.Namespace, edits: dict[str, Any]) -> ModelSpec:
    """The model to evaluate: a run's, or the user's own."""
    from dat.config.model_spec import ModelSpec

    if arguments.model:
        if arguments.runs:
            raise ValueError(f"{arguments.runs[0]}: specify a run or --model, not both")
        if not arguments.data:
            raise ValueError("--model: requires --data, the images to evaluate it on")
        weights = Path(arguments.weights) if arguments.weights else None
        return ModelSpec.of_model(arguments.model, weights, arguments.data, edits)
    if len(arguments.runs) != 1:
        raise ValueError("specify one run folder, or --model, --weights and --data")
    (run,) = arguments.runs
    return ModelSpec.of_run(run, arguments.weights or "best", edits, trust=arguments.trust)


def settings_of(arguments: argparse.Namespace) -> list[str]:
    """The settings as given, and those that have an option of their own."""
    settings = list(arguments.settings)
    settings += [f"evaluate.images={arguments.images}"] if arguments.images else []
    if arguments.data and not arguments.model:
        settings.append(f"data.name={arguments.data}")
    return settings


def results_folder(arguments: argparse.Namespace, subject: ModelSpec, kind: str) -> Path | None:
    """The folder for the results, or None with --out none."""
    if arguments.out == "none":
        return None
    return Path(arguments.out) if arguments.out else subject.folder(kind)
