"""The verification job: an evidence bundle against a model and a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from dat.config.build import make_world
from dat.config.model_spec import ModelSpec
from dat.config.schema import RunConfig
from dat.data import ImageData, Splits, load
from dat.evaluation.bundle import Verification, verify, write_submission
from dat.export import load as load_exported


def verify_bundle(
    path: Path,
    subject: ModelSpec | Path,
    config: RunConfig,
    *,
    submission: Path | None = None,
) -> dict[str, Any]:
    """Check a bundle against a model, or the folder of an exported one, and the config's dataset.
    With `submission`, also write a folder for RobustBench, if all checks pass."""
    with make_world(config) as world:
        data = load(config.data.name, config.data.reading())
        model = _model(subject, data).to(world.device)
        result = verify(path, model, data.test, batch=config.evaluate.batch, world=world)
        report = _report(path, subject, result)
        if submission is not None and result.passed:
            report["robustbench"] = _submit(result, data.test, submission, config.data.name)
        return report


def _model(subject: ModelSpec | Path, data: Splits) -> nn.Module:
    """The model as it is deployed, which is what was evaluated."""
    if isinstance(subject, Path):
        return load_exported(subject)
    return subject.config.objective.deployed(subject.make(data))


def _report(path: Path, subject: ModelSpec | Path, result: Verification) -> dict[str, Any]:
    return {
        "bundle": str(path),
        "sha256": result.bundle.digest,
        "model": str(subject) if isinstance(subject, Path) else subject.name,
        "passed": result.passed,
        "checks": [check._asdict() for check in result.checks],
        "claim": result.bundle.claim.dump(),
    }


def _submit(result: Verification, test: ImageData, folder: Path, dataset: str) -> dict[str, Any]:
    evaluated = result.bundle.images_of(test)
    files = write_submission(result.bundle, evaluated, folder, dataset)
    return {"folder": str(folder), "files": files, "images": len(evaluated), "of": len(test)}
