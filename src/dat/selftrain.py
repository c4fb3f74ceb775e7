"""Self-training (Carmon et al. 2019): one model labels what nobody has, another learns from all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dat.attacks import attack_mode
from dat.build import make_world, unlabelled_data
from dat.comm import World
from dat.data import ImageData, PseudoLabels, load
from dat.measure import Subject
from dat.report import gauge
from dat.rng import seeded

PSEUDO = "pseudo.npz"
BASE, ROBUST = "base", "robust"
ROBUST_ONLY = ("attack", "objective", "train.team", "data.pseudo_labels", "train.rescue")
"""Settings that say nothing to the base model."""


def label(
    subject: Subject, unlabelled: str | None, out: Path, *, quiet: bool = False
) -> dict[str, Any] | None:
    """Label images by a model, by all workers; the first writes the file and gets the figures."""
    config = subject.config
    if unlabelled is not None:
        config = dataclasses.replace(
            config, data=dataclasses.replace(config.data, unlabelled=unlabelled)
        )
    if config.data.unlabelled is None:
        raise ValueError("--unlabelled: which images? rest, a folder, a file of arrays, or a set")
    with make_world(config) as world:
        data = world.together(lambda: load(config.data.name, config.data.reading()))
        images = world.together(lambda: unlabelled_data(config, data))
        assert images is not None
        model = world.together(lambda: subject.make(data)).to(world.device)
        with gauge(f"labelling {len(images)} images", show=world.first and not quiet) as progress:
            found = pseudo_labels(
                config.objective.deployed(model),
                images,
                world,
                batch=config.evaluate.batch,
                seed=config.seed,
                progress=progress,
            )
        if not world.first:
            return None
        found.save(out, images)
        return _figures(found, images.classes) | {"file": str(out), "run": subject.name}


def pseudo_labels(
    model: nn.Module,
    data: ImageData,
    world: World,
    *,
    batch: int = 256,
    seed: int = 0,
    progress: Any = lambda done, total: None,
) -> PseudoLabels:
    """The likeliest class of each image and its probability; all workers get the same."""
    classes = torch.zeros(len(data), dtype=torch.int64)
    chances = torch.zeros(len(data), dtype=torch.float32)
    mine = torch.arange(len(data)).tensor_split(world.size)[world.rank]
    with attack_mode(model), torch.no_grad(), seeded(world.device, seed, "label"):
        for rows in mine.split(batch) if len(mine) else ():
            x, _ = data.batch(rows, world.device)
            best: tuple[Tensor, Tensor] = model(x).softmax(1).max(1)
            chances[rows], classes[rows] = best[0].cpu().float(), best[1].cpu()
            progress(int(rows[-1]) - int(mine[0]) + 1, len(mine))
    return PseudoLabels(world.sum(classes), world.sum(chances))


def _figures(found: PseudoLabels, classes: int) -> dict[str, Any]:
    """How many of each class, and how sure."""
    counts = found.labels.bincount(minlength=classes)
    sure = {f"{least:g}": int((found.confidences >= least).sum()) for least in (0.5, 0.9, 0.99)}
    return {
        "images": len(found.labels),
        "classes": counts.tolist(),
        "confidence": float(found.confidences.mean()),
        "at_least": sure,
    }


def stages(
    recipe: str, settings: Sequence[str], unlabelled: str, base: Sequence[str], out: Path
) -> list[list[str]]:
    """The commands of the pipeline, in order: a base model on the labelled part by standard
    training, labels for the rest, robust training on both."""
    first, labels, last = out / BASE, out / PSEUDO, out / ROBUST
    plain = ["attack.name=none", "objective.name=at", "train.select_by=ta", "train.awp=0"]
    plain += ["train.team=1", "train.sentinel=off", "data.unlabelled=none"]
    plain += ["data.pseudo_labels=none"]
    shared = [word for word in settings if not word.startswith(ROBUST_ONLY)]
    return [
        ["train", recipe, *shared, *plain, *base, "--out", str(first)],
        ["label", str(first), "--unlabelled", unlabelled, "--out", str(labels)],
        ["train", recipe, *settings, f"data.pseudo_labels={labels}", "--out", str(last)],
    ]
