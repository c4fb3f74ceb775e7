"""A closer look at a trained model: class by class, over eps and steps, and in pictures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dat.attacks import Victim, attack_mode
from dat.comm import World
from dat.config import RunConfig
from dat.data import ImageData, some_images
from dat.evaluation import assess, sweep
from dat.evaluation.checks import check_curve
from dat.evaluation.suites import AUTOATTACK, CLEAN, suite
from dat.evaluation.survey import Progress, Verdicts, silent
from dat.files import write_whole
from dat.report import save_picture
from dat.rng import Draws, seeded
from dat.train.folder import EXAMINATION, GALLERY

FALLEN, STANDING = 8, 4
"""Pictures of images that fell to the attack, and of images that withstood it."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
"""Of eps."""
STEPS = (1, 2, 5, 10, 20, 50)


def examine(
    config: RunConfig,
    model: nn.Module,
    test: ImageData,
    world: World,
    *,
    images: int,
    progress: Progress = silent,
) -> Examined | None:
    """Look at `images` test images, by all workers; the first gets what was found."""
    model = config.objective.deployed(model)
    data, threat = some_images(test, images), config.threat
    attack = next(filter(_is_plain, config.evaluate.attacks), "pgd-20")
    shared: dict[str, Any] = {
        "threat": threat,
        "world": world,
        "batch": config.evaluate.batch,
        "seed": config.seed,
        "precision": config.evaluate.precision,
    }
    found = assess(model, data, [attack], keep=True, **shared)
    eps = [share * threat.eps for share in SHARES]
    curves = sweep(model, data, eps=eps, steps=STEPS, progress=progress, **shared)
    if not world.first:
        return None
    warnings = list(found.warnings)
    for curve in curves:
        warnings += check_curve(*curve)
    figures = {
        "attack": attack,
        "threat": threat.dump(),
        "images": len(data),
        "names": [data.names[it] if data.names else str(it) for it in range(data.classes)],
        "ta": found.ta,
        "ra": found.ra(attack),
        "curves": [curve._asdict() for curve in curves],
        "warnings": warnings,
    }
    with seeded(world.device, config.seed, "examine"), attack_mode(model):
        return _look(config, Scene(model, data, world.device), found.suites[attack], figures)


def _is_plain(name: str) -> bool:
    """An attack that is one, not a suite."""
    return name != CLEAN and not name.startswith(AUTOATTACK)


@dataclass(frozen=True)
class Scene:
    """A model and the images that are shown to it."""

    model: nn.Module
    data: ImageData
    device: torch.device

    def answers(self, images: Tensor) -> Tensor:
        """Probabilities."""
        with torch.no_grad():
            parts = [self.model(it.to(self.device)).softmax(1).cpu() for it in images.split(256)]
        return torch.cat(parts)

    def images(self, rows: Tensor) -> Tensor:
        return self.data.batch(rows, torch.device("cpu"))[0]


@dataclass(frozen=True)
class Picture:
    """An image, what it became, and what the model says to both."""

    clean: Tensor
    adversarial: Tensor
    notes: dict[str, Any]


@dataclass(frozen=True)
class Examined:
    """What was found, as JSON has it, and the pictures."""

    figures: dict[str, Any]
    pictures: Sequence[Picture]

    def write(self, run: Path) -> None:
        """Into a run's folder, in place of what an earlier look had left."""
        folder = run / GALLERY
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for number, picture in enumerate(self.pictures):
            change = picture.adversarial - picture.clean
            shown = 0.5 + change / (2 * float(change.abs().max()) or 1.0)
            for kind, image in (
                ("clean", picture.clean),
                ("change", shown),
                ("adversarial", picture.adversarial),
            ):
                save_picture(image, folder / f"{number:02d}-{kind}.png")
        told = self.figures | {"gallery": [it.notes for it in self.pictures]}
        write_whole(run / EXAMINATION, f"{json.dumps(told)}\n".encode())


def _look(config: RunConfig, scene: Scene, verdicts: Verdicts, figures: dict[str, Any]) -> Examined:
    """Who was taken for what, and some pictures of it."""
    data = scene.data
    rows = torch.arange(len(data))
    right = verdicts.fell >= 0
    said = torch.where(right, data.labels, scene.answers(scene.images(rows)).argmax(1))
    fell = (verdicts.fell > 0).nonzero().squeeze(1)
    assert verdicts.examples is not None
    if len(fell):
        said[fell] = scene.answers(verdicts.examples[fell]).argmax(1)
    taken, times = torch.stack((data.labels, said), 1).unique(dim=0, return_counts=True)
    figures |= {
        "confusions": [
            [*pair, count] for pair, count in zip(taken.tolist(), times.tolist(), strict=True)
        ],
        "classes": _classes(data, right, verdicts.standing),
    }
    some = _spread(fell, data.labels, FALLEN)
    withstood = _spread(verdicts.standing.nonzero().squeeze(1), data.labels, STANDING)
    pictures = _pictures(config, scene, some, verdicts.examples[some], fell=True)
    attacked = _attacked(config, scene, withstood, figures["attack"])
    pictures += _pictures(config, scene, withstood, attacked, fell=False)
    return Examined(figures, pictures)


def _classes(data: ImageData, right: Tensor, standing: Tensor) -> list[dict[str, Any]]:
    """Of each class, how many images there are and how many are right."""
    counts = [
        data.labels[it].bincount(minlength=data.classes).tolist()
        for it in (torch.ones_like(right), right, standing)
    ]
    return [
        dict(zip(("images", "right", "standing"), row, strict=True))
        for row in zip(*counts, strict=True)
    ]


def _spread(rows: Tensor, labels: Tensor, count: int) -> Tensor:
    """Some of the rows, of as many classes as there are: first one of each, then a second."""
    turns, seen = [], dict[int, int]()
    for label in labels[rows].tolist():
        turns.append(seen.get(label, 0))
        seen[label] = turns[-1] + 1
    return rows[torch.tensor(turns, dtype=torch.int64).argsort(stable=True)[:count]]


def _attacked(config: RunConfig, scene: Scene, rows: Tensor, attack: str) -> Tensor:
    """What the attack makes of images that withstand it."""
    if not len(rows):
        return scene.images(rows)
    x, y = scene.data.batch(rows, scene.device)
    draws = Draws.of(config.seed, "evaluate", index=scene.data.number(rows).to(scene.device))
    turn = suite(attack, scene.data.classes).rounds[0]
    return turn.attack(Victim(scene.model, y), x, config.threat, draws).cpu()


def _pictures(
    config: RunConfig, scene: Scene, rows: Tensor, x_adv: Tensor, *, fell: bool
) -> list[Picture]:
    if not len(rows):
        return []
    x = scene.images(rows)
    before, after = scene.answers(x), scene.answers(x_adv)
    found = []
    for place, row in enumerate(rows.tolist()):
        change = (x_adv[place] - x[place]).flatten()
        notes = {
            "image": int(scene.data.number(rows[place])),
            "label": int(scene.data.labels[row]),
            "fell": fell,
            "clean": _answer(before[place]),
            "adversarial": _answer(after[place]),
            "distance": float(change.norm(float("inf") if config.threat.norm == "linf" else 2)),
            "highest": float(change.abs().max()),
        }
        found.append(Picture(x[place], x_adv[place], notes))
    return found


def _answer(probabilities: Tensor) -> dict[str, Any]:
    sure, answer = probabilities.max(0)
    return {"class": int(answer), "sure": float(sure)}
