"""Self-training (Carmon et al. 2019): a base model labels the unlabelled images, and a robust one
learns from all images."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dat.attacks import attack_mode
from dat.config.build import make_world, unlabelled_data
from dat.config.model_spec import ModelSpec
from dat.core.rng import seeded
from dat.data import ImageData, PseudoLabels, load
from dat.distributed import World
from dat.models import adapted
from dat.report import progress_bar

PSEUDO = "pseudo.npz"
BASE, ROBUST = "base", "robust"
ROBUST_ONLY = ("attack", "objective", "train.team", "data.pseudo_labels", "train.rescue")
"""Settings that do not apply to the base model."""


def label(
    spec: ModelSpec, unlabelled: str | None, out: Path, *, quiet: bool = False
) -> dict[str, Any] | None:
    """Label images with a model, on all workers; rank 0 writes the file and returns a summary."""
    config = spec.config
    if unlabelled is not None:
        config = dataclasses.replace(
            config, data=dataclasses.replace(config.data, unlabelled=unlabelled)
        )
    if config.data.unlabelled is None:
        raise ValueError(
            "--unlabelled is required: rest, a folder of images, a file of arrays, or a dataset"
        )
    with make_world(config) as world:
        data = world.run_or_fail_together(lambda: load(config.data.name, config.data.reading()))
        images = world.run_or_fail_together(lambda: unlabelled_data(config, data))
        assert images is not None
        model = world.run_or_fail_together(lambda: spec.make(data)).to(world.device)
        with progress_bar(
            f"labelling {len(images)} images", show=world.first and not quiet
        ) as progress:
            labels = pseudo_labels(
                config.objective.deployed(model),
                images,
                world,
                batch=config.evaluate.batch,
                seed=config.seed,
                progress=progress,
            )
        if not world.first:
            return None
        labels.save(out, images)
        return _summary(labels, images.classes) | {"file": str(out), "run": spec.name}


def pseudo_labels(
    model: nn.Module,
    data: ImageData,
    world: World,
    *,
    batch: int = 256,
    seed: int = 0,
    progress: Any = lambda done, total: None,
) -> PseudoLabels:
    """The most likely class of each image and its probability, the same on all workers."""
    classes = torch.zeros(len(data), dtype=torch.int64)
    confidences = torch.zeros(len(data), dtype=torch.float32)
    own = torch.arange(len(data)).tensor_split(world.size)[world.rank]
    if len(data):
        model = adapted(model, data.batch(torch.arange(min(len(data), 8)), world.device)[0])
    with attack_mode(model), torch.no_grad(), seeded(world.device, seed, "label"):
        for rows in own.split(batch) if len(own) else ():
            x, _ = data.batch(rows, world.device)
            best: tuple[Tensor, Tensor] = model(x).softmax(1).max(1)
            confidences[rows], classes[rows] = best[0].cpu().float(), best[1].cpu()
            progress(int(rows[-1]) - int(own[0]) + 1, len(own))
    return PseudoLabels(world.sum(classes), world.sum(confidences))


def _summary(pseudo: PseudoLabels, classes: int) -> dict[str, Any]:
    """The number of images per class, and the distribution of confidences."""
    counts, confidences = pseudo.labels.bincount(minlength=classes), pseudo.confidences
    return {
        "images": len(pseudo.labels),
        "classes": counts.tolist(),
        "confidence": float(confidences.mean()),
        "at_least": {f"{least:g}": int((confidences >= least).sum()) for least in (0.5, 0.9, 0.99)},
    }


def stages(
    recipe: str, settings: Sequence[str], unlabelled: str, base: Sequence[str], out: Path
) -> list[list[str]]:
    """The commands of the pipeline: standard training of a base model on the labelled images,
    labelling of the rest, and robust training on all."""
    base_run, labels, robust_run = out / BASE, out / PSEUDO, out / ROBUST
    standard = ["attack.name=none", "objective.name=at", "train.select_by=ta", "train.awp=0"]
    standard += ["train.team=1", "train.sentinel=off", "data.unlabelled=none"]
    standard += ["data.pseudo_labels=none"]
    shared = [setting for setting in settings if not setting.startswith(ROBUST_ONLY)]
    return [
        ["train", recipe, *shared, *standard, *base, "--out", str(base_run)],
        ["label", str(base_run), "--unlabelled", unlabelled, "--out", str(labels)],
        ["train", recipe, *settings, f"data.pseudo_labels={labels}", "--out", str(robust_run)],
    ]
