"""A model under one or several suites of attacks, with the checks that make the result credible."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dat.attacks import attack_mode
from dat.comm import World
from dat.data import ImageData
from dat.evaluation import checks
from dat.evaluation.journal import Journal, fingerprint
from dat.evaluation.suites import Suite, clean, suite
from dat.evaluation.survey import PRECISIONS, Progress, Surveyor, Verdicts, silent
from dat.models import Folded, fold
from dat.rng import seeded
from dat.threat import ThreatModel

FOLD_FROM = 2000
"""Forward passes from which on a faster copy of the network is worth making."""


@dataclass(frozen=True)
class Assessment:
    """What an evaluation found."""

    right: Tensor
    """Which images are classified right without an attack."""
    suites: dict[str, Verdicts]
    warnings: tuple[str, ...] = ()
    network: str = ""
    """What was done to the network that the attacks worked on."""

    @property
    def images(self) -> int:
        return len(self.right)

    @property
    def ta(self) -> float:
        """Test accuracy in percent."""
        return 100.0 * int(self.right.sum()) / self.images

    def ra(self, name: str) -> float:
        """Robust accuracy under a suite, in percent."""
        return 100.0 * int(self.suites[name].standing.sum()) / self.images


def assess(
    model: nn.Module,
    data: ImageData,
    attacks: Sequence[str | Suite] = ("autoattack",),
    *,
    threat: ThreatModel,
    world: World,
    batch: int = 256,
    seed: int = 0,
    precision: str = "float32",
    folder: Path | None = None,
    keep: bool = False,
    check: bool = True,
    progress: Progress = silent,
) -> Assessment:
    """TA, and RA under each of `attacks`, every one on all images that are right to begin with.

    Called by every worker of `world`; each judges its share and all get the same result. With a
    `folder`, which all workers must share, an interrupted evaluation goes on where it was. `keep`
    keeps the adversarial examples, `check` looks for signs of false robustness. With a lower
    `precision` the attacks work in mixed precision; verdicts are still the model's own.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision = {precision!r}: must be one of {', '.join(PRECISIONS)}")
    few = torch.arange(min(len(data), checks.IMAGES))
    x, y = data.batch(few, world.device)
    warnings: list[str] = []
    with attack_mode(model), seeded(world.device, seed, "answers"), torch.no_grad():
        found = world.together(lambda: checks.check_answers(model, x, data.classes))
        answers = model(x)
    classes = answers.shape[1]
    suites = [suite(it, classes) if isinstance(it, str) else it for it in attacks]
    work = sum(turn.attack.cost() for it in suites for turn in it.rounds) * len(data)
    with seeded(world.device, seed, "fold"):
        folded = fold(model, x) if work >= FOLD_FROM else Folded(model, "not folded: little to do")
    surveyor = Surveyor(
        model=model,
        network=folded.network,
        data=data,
        threat=threat,
        world=world,
        batch=batch,
        seed=seed,
        precision=precision,
        keep=keep,
        progress=progress,
    )
    if check:
        warnings += found
        with attack_mode(folded.network), seeded(world.device, seed, "checks"):
            warnings += checks.check_gradients(folded.network, x, y)
            warnings += checks.check_attacks(folded.network, x, y, threat)
    everybody = torch.ones(len(data), dtype=torch.bool)
    right = surveyor.survey(clean().rounds, everybody).standing
    results = {}
    for it in suites:
        surveyor.expect(it.rounds, int(right.sum()))
    for it in suites:
        journal = _journal(folder, it, surveyor, answers) if folder and it.rounds else None
        results[it.name] = surveyor.survey(it.rounds, right, journal)
        if journal and world.first:
            share = 100.0 / len(data)
            standing = int(results[it.name].standing.sum())
            figures = {"images": len(data), "ta": share * int(right.sum()), "ra": share * standing}
            journal.conclude(results[it.name].fallen(), figures)
        if check:
            warnings += checks.check_square(results[it.name])
    return Assessment(right, results, tuple(warnings), folded.note)


def _journal(folder: Path, it: Suite, surveyor: Surveyor, answers: Tensor) -> Journal:
    about: dict[str, Any] = {
        "suite": it.name,
        "rounds": [f"{turn.name}: {turn.attack!r}" for turn in it.rounds],
        "threat": surveyor.threat.dump(),
        "seed": surveyor.seed,
        "precision": surveyor.precision,
        "examples": surveyor.keep,
    } | fingerprint(surveyor.model, surveyor.data, answers)
    key = hashlib.blake2b(json.dumps(about).encode(), digest_size=4).hexdigest()
    journal = Journal(folder / f"{it.name}-{key}", about)
    journal.shared(surveyor.world)
    return journal
