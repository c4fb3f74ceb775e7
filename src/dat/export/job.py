"""The export job: a run in, a folder with its model out, checked before it is there."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dat.build import read_result, read_run
from dat.data import Splits, load, some_images
from dat.export.card import CARD, model_card
from dat.export.facts import FACTS, Facts, describe
from dat.export.figures import known_figures
from dat.export.formats import HUB, TRACED, Answer, check_formats, write_traced
from dat.export.loading import WEIGHTS_FILE
from dat.export.loading import load as load_exported
from dat.files import write_whole
from dat.measure import Subject
from dat.smoothing import Smoothed
from dat.train import save_weights
from dat.train.folder import RESULT

IMAGES = 8
"""On which a written model must agree with the original."""
TOLERANCE = 1e-4
"""By how much logits may differ, as a share of the largest: other kernels round otherwise."""
OURS = {FACTS, CARD, WEIGHTS_FILE, *(it.file for it in TRACED.values())}


def export_run(
    run: Path | str,
    *,
    weights: str = "best",
    formats: Sequence[str] = (HUB,),
    out: Path | str | None = None,
    edits: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Leave a run's model in a folder, in each of `formats`, with its facts and a model card.

    Every file is read back and compared with the run's model; one that disagrees is an error, and
    nothing is left. `edits` are settings that tell where the data is now.
    """
    run = Path(run)
    check_formats(formats)
    subject = Subject.of_run(run, weights, edits)
    assert subject.weights is not None
    out = Path(out) if out else run / "export" / subject.weights.stem
    check_folder(out, overwrite=overwrite)
    config = subject.config
    data = load(config.data.name, config.data.reading())
    model = subject.make(data).eval().requires_grad_(False)
    deployed = config.objective.deployed(model)
    figures = known_figures(run, subject.weights, model, deployed)
    facts = describe(config, data, model, training=_training(run, subject), figures=figures)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as made:
        found = _write(Path(made) / "model", facts, model, _images(data), formats)
        if out.exists():
            shutil.rmtree(out)
        (Path(made) / "model").rename(out)
    return {"folder": str(out), "weights": subject.weights.stem, "files": found, "figures": figures}


def check_folder(out: Path, *, overwrite: bool) -> None:
    """Refuse a folder that holds something, unless it is an export that is to be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    is_export = FACTS in names and names <= OURS
    if not (overwrite and is_export):
        hint = "--overwrite to replace that export" if is_export else "remove it yourself"
        raise ValueError(f"{out} is in use: choose another --out, or {hint}")


def _training(run: Path, subject: Subject) -> dict[str, Any]:
    """How the weights came about, in words."""
    assert subject.weights is not None
    told: dict[str, Any] = {"recipe": Path(read_run(run)[0]).stem, "weights": subject.weights.stem}
    if (run / RESULT).is_file():
        result = read_result(run)
        told |= {key: result[key] for key in ("method", "workers", "steps") if key in result}
    return told


def _images(data: Splits) -> Tensor:
    """A few, of different classes."""
    some = some_images(data.test, min(IMAGES, len(data.test)))
    x, _ = some.batch(torch.arange(len(some)), torch.device("cpu"))
    return x.contiguous()


def _write(
    folder: Path, facts: Facts, model: nn.Module, x: Tensor, formats: Sequence[str]
) -> list[dict[str, Any]]:
    """All files, each with its size and how far its logits are from the model's."""
    folder.mkdir()
    facts.write(folder)
    deployed, found = facts.deployed(model).eval(), []
    traced = deployed.settled(x) if isinstance(deployed, Smoothed) else deployed
    for name in dict.fromkeys(formats):
        answer: Answer
        if name == HUB:
            file = WEIGHTS_FILE
            save_weights(model, folder / file)
            answer = load_exported(folder, network=facts.network["model"]["name"])
        else:
            file = TRACED[name].file
            answer = write_traced(name, traced, x, folder)
        difference = _difference(deployed, answer, x)
        if not difference <= TOLERANCE:  # nor NaN
            raise ValueError(
                f"--format {name}: what was written answers otherwise than the model (logits are "
                f"{difference:.2g} of the largest apart): nothing is left of it"
            )
        size = (folder / file).stat().st_size
        found.append({"format": name, "file": file, "bytes": size, "difference": difference})
    write_whole(folder / CARD, model_card(facts, formats).encode())
    return found


@torch.no_grad()
def _difference(model: nn.Module, answer: Answer, x: Tensor) -> float:
    """The largest, on a batch, on another one and on a single image: what tracing has frozen shows
    up there. An answer of another shape is as far off as can be."""
    worst = 0.0
    for images in (x, 1 - x.flip(0), x[:1], x.repeat(3, 1, 1, 1)):
        wanted, found = model(images), answer(images.clone())
        if wanted.shape != found.shape:
            return float("inf")
        apart = (wanted - found).abs().max() / wanted.abs().max().clamp_min(1e-12)
        worst = max(worst, float(apart)) if apart.isfinite() else float("inf")
    return worst
