"""Error analysis of a trained model: by class, by confusion, over eps and steps, and in images."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dat.attacks import AttackTarget, attack_mode
from dat.attacks.suites import AUTOATTACK, CLEAN, suite
from dat.config.schema import RunConfig
from dat.core.files import ERROR_ANALYSIS, GALLERY, atomic_write
from dat.core.progress import Progress, silent
from dat.core.rng import Streams, seeded
from dat.data import ImageData, class_balanced_subset
from dat.distributed import World
from dat.evaluation import assess, sweep
from dat.evaluation.checks import check_curve
from dat.evaluation.runner import SuiteResult
from dat.models import adapted
from dat.report import save_picture

BROKEN_SHOWN, ROBUST_SHOWN = 8, 4
"""Gallery images on which the attack succeeds, and on which it fails."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
"""Multiples of eps in the RA curve."""
STEPS = (1, 2, 5, 10, 20, 50)


def analyze_errors(
    config: RunConfig,
    model: nn.Module,
    test: ImageData,
    world: World,
    *,
    images: int,
    progress: Progress = silent,
) -> ErrorAnalysis | None:
    """Analyze the errors on `images` test images, on all workers; rank 0 gets the result."""
    model = config.objective.deployed(model)
    data, threat = class_balanced_subset(test, images), config.threat
    attack = next(filter(_is_single_attack, config.evaluate.attacks), "pgd-20")
    shared: dict[str, Any] = {
        "threat": threat,
        "world": world,
        "batch": config.evaluate.batch,
        "seed": config.seed,
        "precision": config.evaluate.precision,
    }
    assessment = assess(model, data, [attack], keep=True, **shared)
    eps = [share * threat.eps for share in SHARES]
    curves = sweep(model, data, eps=eps, steps=STEPS, progress=progress, **shared)
    if not world.first:
        return None
    warnings = list(assessment.warnings)
    for curve in curves:
        warnings += check_curve(*curve)
    classes = range(data.classes)
    figures = {
        "attack": attack,
        "threat": threat.dump(),
        "images": len(data),
        "names": [data.names[label] if data.names else str(label) for label in classes],
        "ta": assessment.ta,
        "ra": assessment.ra(attack),
        "curves": [curve._asdict() for curve in curves],
        "warnings": warnings,
    }
    model = adapted(model, data.batch(torch.arange(min(len(data), 8)), world.device)[0])
    # the stream keeps its name, and the analysis its bits
    with seeded(world.device, config.seed, "examine"), attack_mode(model):
        predictor = Predictor(model, data, world.device)
        return _analyze(config, predictor, assessment.suites[attack], figures)


def _is_single_attack(name: str) -> bool:
    return name != CLEAN and not name.startswith(AUTOATTACK)


@dataclass(frozen=True)
class Predictor:
    """A model and the images to classify."""

    model: nn.Module
    data: ImageData
    device: torch.device

    def probabilities(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            batches = images.split(256)
            outputs = [self.model(batch.to(self.device)).softmax(1).cpu() for batch in batches]
        return torch.cat(outputs)

    def images(self, rows: Tensor) -> Tensor:
        return self.data.batch(rows, torch.device("cpu"))[0]


@dataclass(frozen=True)
class GalleryImage:
    """A clean and an adversarial image, with the model's predictions for both."""

    clean: Tensor
    adversarial: Tensor
    notes: dict[str, Any]


@dataclass(frozen=True)
class ErrorAnalysis:
    """The metrics, as JSON types, and the gallery."""

    figures: dict[str, Any]
    gallery: Sequence[GalleryImage]

    def write(self, run: Path) -> None:
        """Write to a run's folder, replacing an earlier analysis."""
        folder = run / GALLERY
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for number, image in enumerate(self.gallery):
            change = image.adversarial - image.clean
            amplified = 0.5 + change / (2 * float(change.abs().max()) or 1.0)
            for kind, pixels in (
                ("clean", image.clean),
                ("change", amplified),
                ("adversarial", image.adversarial),
            ):
                save_picture(pixels, folder / f"{number:02d}-{kind}.png")
        values = self.figures | {"gallery": [image.notes for image in self.gallery]}
        atomic_write(run / ERROR_ANALYSIS, f"{json.dumps(values)}\n".encode())


def _analyze(
    config: RunConfig, predictor: Predictor, result: SuiteResult, figures: dict[str, Any]
) -> ErrorAnalysis:
    """Confusions, accuracy by class, and a gallery of images."""
    data = predictor.data
    rows = torch.arange(len(data))
    correct = result.broken_by >= 0
    clean_predictions = predictor.probabilities(predictor.images(rows)).argmax(1)
    predictions = torch.where(correct, data.labels, clean_predictions)
    broken = (result.broken_by > 0).nonzero().squeeze(1)
    assert result.examples is not None
    if len(broken):
        predictions[broken] = predictor.probabilities(result.examples[broken]).argmax(1)
    pairs, counts = torch.stack((data.labels, predictions), 1).unique(dim=0, return_counts=True)
    figures |= {
        "confusions": [
            [*pair, count] for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True)
        ],
        "classes": _classes(data, correct, result.robust),
    }
    broken_rows = _spread(broken, data.labels, BROKEN_SHOWN)
    robust_rows = _spread(result.robust.nonzero().squeeze(1), data.labels, ROBUST_SHOWN)
    gallery = _gallery(config, predictor, broken_rows, result.examples[broken_rows], broken=True)
    attacked = _attacked(config, predictor, robust_rows, figures["attack"])
    gallery += _gallery(config, predictor, robust_rows, attacked, broken=False)
    return ErrorAnalysis(figures, gallery)


def _classes(data: ImageData, correct: Tensor, robust: Tensor) -> list[dict[str, Any]]:
    """For each class the number of images, of correct ones, and of robust ones."""
    counts = [
        data.labels[selected].bincount(minlength=data.classes).tolist()
        for selected in (torch.ones_like(correct), correct, robust)
    ]
    return [
        dict(zip(("images", "right", "standing"), row, strict=True))
        for row in zip(*counts, strict=True)
    ]


def _spread(rows: Tensor, labels: Tensor, count: int) -> Tensor:
    """Choose `count` rows from as many classes as possible: first one of each, then a second."""
    turns, occurrences = [], dict[int, int]()
    for label in labels[rows].tolist():
        turns.append(occurrences.get(label, 0))
        occurrences[label] = turns[-1] + 1
    return rows[torch.tensor(turns, dtype=torch.int64).argsort(stable=True)[:count]]


def _attacked(config: RunConfig, predictor: Predictor, rows: Tensor, attack: str) -> Tensor:
    """The perturbed images of an attack that fails on them."""
    if not len(rows):
        return predictor.images(rows)
    x, y = predictor.data.batch(rows, predictor.device)
    index = predictor.data.number(rows).to(predictor.device)
    draws = Streams.of(config.seed, "evaluate", index=index)
    attack_round = suite(attack, predictor.data.classes).rounds[0]
    return attack_round.attack(AttackTarget(predictor.model, y), x, config.threat, draws).cpu()


def _gallery(
    config: RunConfig, predictor: Predictor, rows: Tensor, x_adv: Tensor, *, broken: bool
) -> list[GalleryImage]:
    if not len(rows):
        return []
    x = predictor.images(rows)
    before, after = predictor.probabilities(x), predictor.probabilities(x_adv)
    gallery = []
    for position, row in enumerate(rows.tolist()):
        change = (x_adv[position] - x[position]).flatten()
        notes = {
            "image": int(predictor.data.number(rows[position])),
            "label": int(predictor.data.labels[row]),
            "fell": broken,
            "clean": _prediction(before[position]),
            "adversarial": _prediction(after[position]),
            "distance": float(change.norm(float("inf") if config.threat.norm == "linf" else 2)),
            "highest": float(change.abs().max()),
        }
        gallery.append(GalleryImage(x[position], x_adv[position], notes))
    return gallery


def _prediction(probabilities: Tensor) -> dict[str, Any]:
    confidence, label = probabilities.max(0)
    return {"class": int(label), "sure": float(confidence)}
