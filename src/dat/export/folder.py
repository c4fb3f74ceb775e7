"""Export the model of a run to a folder, after verifying every file."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dat.config.model_spec import ModelSpec
from dat.config.runs import read_result, read_run
from dat.core.files import RESULT, atomic_write
from dat.core.smoothing import Smoothed
from dat.data import Splits, class_balanced_subset, load
from dat.export.card import CARD, model_card
from dat.export.description import DESCRIPTION, ModelDescription, describe
from dat.export.figures import known_figures
from dat.export.formats import HUB, TRACED, Predictor, check_formats, write_traced
from dat.export.loading import WEIGHTS_FILE
from dat.export.loading import load as load_exported
from dat.train import save_weights

IMAGES = 8
"""Number of images on which an exported model must agree with the original."""
TOLERANCE = 1e-4
"""Largest difference of logits, relative to the largest logit, due to rounding in other kernels."""
EXPORTED_FILES = {
    DESCRIPTION,
    CARD,
    WEIGHTS_FILE,
    *(traced_format.file for traced_format in TRACED.values()),
}


def export_run(
    run: Path | str,
    *,
    weights: str = "best",
    formats: Sequence[str] = (HUB,),
    out: Path | str | None = None,
    edits: dict[str, Any] | None = None,
    overwrite: bool = False,
    trust: bool = False,
) -> dict[str, Any]:
    """Export a run's model to a folder in each of `formats`, with its description and a model card.

    Every file is read back and compared with the run's model; if one disagrees, this raises an
    error and writes nothing. `edits` are settings that override those of the run, for example the
    location of the data. They must also name any custom code that the run uses, unless you `trust`
    its folder.
    """
    run = Path(run)
    check_formats(formats)
    subject = ModelSpec.of_run(run, weights, edits, trust=trust)
    assert subject.weights is not None
    out = Path(out) if out else run / "export" / subject.weights.stem
    check_folder(out, overwrite=overwrite)
    config = subject.config
    data = load(config.data.name, config.data.reading())
    model = subject.make(data).eval().requires_grad_(False)
    deployed = config.objective.deployed(model)
    figures = known_figures(run, subject.weights, model, deployed)
    description = describe(config, data, model, training=_training(run, subject), figures=figures)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
        folder = Path(temporary) / "model"
        files = _write(folder, description, model, _test_images(data), formats)
        if out.exists():
            shutil.rmtree(out)
        folder.rename(out)
    return {"folder": str(out), "weights": subject.weights.stem, "files": files, "figures": figures}


def check_folder(out: Path, *, overwrite: bool) -> None:
    """Raise if the folder is not empty, unless it is an export and `overwrite` is set."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    is_export = DESCRIPTION in names and names <= EXPORTED_FILES
    if not (overwrite and is_export):
        hint = "--overwrite to replace that export" if is_export else "remove it yourself"
        raise ValueError(f"{out} already exists: choose another --out, or {hint}")


def _training(run: Path, subject: ModelSpec) -> dict[str, Any]:
    """How the weights were trained."""
    assert subject.weights is not None
    recipe, _ = read_run(run, trust=True)
    training: dict[str, Any] = {"recipe": Path(recipe).stem, "weights": subject.weights.stem}
    if (run / RESULT).is_file():
        result = read_result(run)
        training |= {key: result[key] for key in ("method", "workers", "steps") if key in result}
    return training


def _test_images(data: Splits) -> Tensor:
    """A few test images of different classes."""
    subset = class_balanced_subset(data.test, min(IMAGES, len(data.test)))
    x, _ = subset.batch(torch.arange(len(subset)), torch.device("cpu"))
    return x.contiguous()


def _write(
    folder: Path,
    description: ModelDescription,
    model: nn.Module,
    x: Tensor,
    formats: Sequence[str],
) -> list[dict[str, Any]]:
    """Write and verify all files; returns the size of each and the difference of its logits."""
    folder.mkdir()
    description.write(folder)
    deployed, files = description.deployed(model).eval(), []
    traced = deployed.with_fixed_noise(x) if isinstance(deployed, Smoothed) else deployed
    for name in dict.fromkeys(formats):
        exported: Predictor
        if name == HUB:
            file = WEIGHTS_FILE
            save_weights(model, folder / file)
            exported = load_exported(folder, network=description.network["model"]["name"])
        else:
            file = TRACED[name].file
            exported = write_traced(name, traced, x, folder)
        difference = _difference(deployed, exported, x, name)
        if not difference <= TOLERANCE:  # also rejects NaN
            raise ValueError(
                f"--format {name}: the exported model disagrees with the run's model (logits "
                f"differ by {difference:.2g} of the largest); nothing was written"
            )
        size = (folder / file).stat().st_size
        files.append({"format": name, "file": file, "bytes": size, "difference": difference})
    atomic_write(folder / CARD, model_card(description, formats).encode())
    return files


@torch.no_grad()
def _difference(model: nn.Module, exported: Predictor, x: Tensor, name: str) -> float:
    """The largest relative difference of logits on several batches and a single image, which
    reveals values frozen by tracing; infinite if the shape differs."""
    largest = 0.0
    for images in (x, 1 - x.flip(0), x[:1], x.repeat(3, 1, 1, 1)):
        expected = model(images)
        try:
            actual = exported(images.clone())
        except Exception as error:  # each format's runtime raises its own types
            raise ValueError(
                f"--format {name}: the exported model takes batches of {len(x)} only, as the "
                "network computes with a fixed batch size; use x.flatten(1), or x.shape[0] instead "
                "of len(x)"
            ) from error
        if expected.shape != actual.shape:
            return float("inf")
        difference = (expected - actual).abs().max() / expected.abs().max().clamp_min(1e-12)
        largest = max(largest, float(difference)) if difference.isfinite() else float("inf")
    return largest
