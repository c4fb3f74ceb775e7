"""The evaluation jobs: a run of ours or anybody's model under attack, and sweeps over several."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from dat.build import (
    accuracy_of,
    check_attacks,
    figures,
    make_model,
    make_world,
    read_run,
)
from dat.certification import Certified, certify, largest_radius
from dat.comm import World
from dat.config import RunConfig, merge
from dat.data import ImageData, Splits, load, some_images
from dat.evaluation import Assessment, Curve, sweep
from dat.evaluation.checks import check_curve
from dat.evaluation.suites import suite
from dat.examination import examine
from dat.files import WEIGHTS
from dat.models import build_model
from dat.objectives import Noisy
from dat.report import gauge
from dat.train import load_weights
from dat.train.folder import EXAMINATION, MEASURED


@dataclass(frozen=True)
class Subject:
    """A model to measure, and how to come by it."""

    name: str
    config: RunConfig
    weights: Path | None
    ours: bool
    """Made by a run of ours: its network comes with the run's normalisation. Else `model.name` is a
    factory of a whole model, from images in [0, 1] to logits."""

    def folder(self, kind: str) -> Path:
        """Where what is found is kept."""
        return Path(self.name) / kind if self.ours else Path(kind) / self.name

    @classmethod
    def of_run(
        cls, run: Path, weights: str = "best", edits: dict[str, Any] | None = None
    ) -> Subject:
        _, config = read_run(run, edits)
        file = run / f"{weights}.safetensors" if weights in WEIGHTS else Path(weights)
        return cls(str(run), config, file, True)

    @classmethod
    def of_model(
        cls, factory: str, weights: Path | None, data: str, edits: dict[str, Any] | None = None
    ) -> Subject:
        settings = merge(edits or {}, {"model": {"name": factory}, "data": {"name": data}})
        name = factory.rpartition(":")[2]
        config = RunConfig.read(settings)
        return cls(name, config, weights, False)

    def make(self, data: Splits) -> nn.Module:
        """The model with its weights."""
        if self.ours:
            model = make_model(self.config, data)
        else:
            width = self.config.model.width
            images = data.test
            model = build_model(
                self.config.model.name, images.classes, channels=images.channels, width=width
            )
        if self.weights is not None:
            load_weights(model, self.weights)
        return model


def look_closely(run: Path, images: int | None = None, *, quiet: bool = False) -> None:
    """For a run's report: at so many test images, or if that was not done before at as many as its
    settings say. A run that has no weights yet is left alone."""
    subject = Subject.of_run(run)
    assert subject.weights is not None
    known = images is None and (run / EXAMINATION).is_file()
    images = subject.config.evaluate.report if images is None else images
    if known or not images or not subject.weights.is_file():
        return
    with make_world(subject.config) as world:
        data, model = prepare(subject, world)
        with gauge(f"looking closely at {subject.name}", show=not quiet) as progress:
            found = examine(subject.config, model, data, world, images=images, progress=progress)
        assert found is not None  # there is one worker
        found.write(run)


def write_down(subject: Subject, kind: str, found: dict[str, Any]) -> None:
    """Add what was measured to the run's folder, for its report."""
    if subject.ours:
        with (Path(subject.name) / MEASURED).open("a") as file:
            file.write(json.dumps({"kind": kind} | found) + "\n")


def measure(
    subject: Subject,
    folder: Path | None = None,
    *,
    check: bool = True,
    keep: bool = False,
    quiet: bool = False,
) -> dict[str, Any] | None:
    """Measure a model on its test set, by all workers; the first gets the figures."""
    with make_world(subject.config) as world:
        start = time.perf_counter()
        data, model = prepare(subject, world)
        with gauge(f"evaluating {subject.name}", show=world.first and not quiet) as progress:
            found = accuracy_of(
                subject.config,
                model,
                data,
                world,
                folder=folder,
                keep=keep,
                check=check,
                progress=progress,
            )
        seconds = time.perf_counter() - start
        if not world.first:
            return None
        report = _report(subject, found, world, seconds)
        if folder:
            write_down(subject, "evaluate", report)
        return report


def prepare(subject: Subject, world: World) -> tuple[ImageData, nn.Module]:
    """The test images and the model, or one error for all workers."""
    data = world.together(lambda: load(subject.config.data.name, subject.config.data.reading()))
    world.together(lambda: check_attacks(subject.config, data.test.classes))
    model = world.together(lambda: subject.make(data))
    return data.test, model.to(world.device)


def _report(subject: Subject, found: Assessment, world: World, seconds: float) -> dict[str, Any]:
    suites = {
        name: {
            "ra": found.ra(name),
            "fell": verdicts.counts(),
            "costs": {attack: cost._asdict() for attack, cost in verdicts.costs.items()},
        }
        for name, verdicts in found.suites.items()
    }
    return {
        "run": subject.name,
        "weights": subject.weights.stem if subject.weights else "as made",
        **figures(subject.config, found),
        "suites": suites,
        "warnings": list(found.warnings),
        "network": found.network,
        "workers": world.size,
        "seconds": seconds,
    }


@dataclass(frozen=True, kw_only=True)
class Certification:
    """What is asked of a smoothed classifier."""

    sigma: float
    radii: tuple[float, ...] = ()
    fixed: bool = True
    n0: int = 100
    n: int = 100_000
    alpha: float = 0.001
    batch: int | None = None
    seed: int = 0

    def check(self) -> list[str]:
        """What no number of samples up to n can show."""
        if not self.sigma > 0 or not 0 < self.alpha < 0.5:
            return []  # refused later, by name
        most = largest_radius(self.sigma, self.n, self.alpha)
        return [
            f"r = {r:g} cannot be certified with sigma {self.sigma:g}, n = {self.n} and alpha "
            f"{self.alpha:g}: {most:.3g} at most"
            for r in self.radii
            if r > most
        ]


def own_sigma(subject: Subject) -> float | None:
    """The noise that a run was trained with, if it was."""
    objective = subject.config.objective
    return objective.sigma if subject.ours and isinstance(objective, Noisy) else None


def certify_subject(
    subject: Subject, asked: Certification, folder: Path | None = None, *, quiet: bool = False
) -> dict[str, Any] | None:
    """Certify a model on its test set, by all workers; the first gets the figures."""
    config = subject.config
    with make_world(config) as world:
        start = time.perf_counter()
        data, model = prepare(subject, world)
        with gauge(f"certifying {subject.name}", show=world.first and not quiet) as progress:
            found = certify(
                model,
                some_images(data, config.evaluate.images),
                **dataclasses.asdict(asked),
                precision=config.evaluate.precision,
                folder=folder,
                world=world,
                progress=progress,
            )
        seconds = time.perf_counter() - start
        if not world.first:
            return None
        report = _certified(subject, asked, found, world, seconds)
        if folder:
            write_down(subject, "certify", report)
        return report


def _certified(
    subject: Subject, asked: Certification, found: Certified, world: World, seconds: float
) -> dict[str, Any]:
    radii = asked.radii or tuple(quarter * asked.sigma / 2 for quarter in range(8))
    settled = dict(zip(found.radii, found.asked.double().mean(0).tolist(), strict=True))
    return {
        "run": subject.name,
        "weights": subject.weights.stem if subject.weights else "as made",
        "images": len(found.labels),
        "sigma": asked.sigma,
        "alpha": asked.alpha,
        "n": asked.n,
        "mode": "fixed" if asked.fixed else "adaptive",
        "ca": [
            {"radius": r, "ca": found.accuracy(r), "samples": settled.get(r, asked.n0 + asked.n)}
            for r in sorted(set(radii))
        ],
        "acr": found.acr,
        "abstained": found.abstained,
        "samples_per_image": float(found.samples.double().mean()),
        "samples_per_second": float(found.samples.sum()) / float(found.seconds.sum()),
        "batch": found.batch,
        "network": found.network,
        "precision": subject.config.evaluate.precision,
        "warnings": asked.check(),
        "workers": world.size,
        "seconds": seconds,
    }


def split_attack(name: str) -> tuple[str, int]:
    """`pgd-20`: an attack that takes a number of steps, and that number."""
    word, _, count = name.rpartition("-")
    if not count.isdigit() or int(count) < 1:
        raise ValueError(f"--attack {name}: an attack with its steps, e.g. pgd-20, cw-50")
    suite(name, 10)
    return word, int(count)


def default_eps(subjects: Sequence[Subject]) -> tuple[float, ...]:
    """Nine radii, up to twice the one that the first model was made for."""
    own = subjects[0].config.threat.eps
    return tuple(own * quarter / 4 for quarter in range(9))


class Swept(NamedTuple):
    """The curves of several models, and what is odd about them."""

    curves: dict[str, list[Curve]]
    warnings: list[str]


def sweep_all(
    subjects: Sequence[Subject],
    *,
    eps: Sequence[float],
    steps: Sequence[int],
    attack: str,
    at_steps: int,
    quiet: bool = False,
) -> Swept | None:
    """RA of several models over eps and over steps; the first worker gets the result."""
    swept = Swept({}, [])
    with make_world(subjects[0].config) as world:
        for subject in subjects:
            data, model = prepare(subject, world)
            with gauge(f"sweeping {subject.name}", show=world.first and not quiet) as progress:
                curves = sweep(
                    subject.config.objective.deployed(model),
                    some_images(data, subject.config.evaluate.images),
                    threat=subject.config.threat,
                    eps=eps,
                    steps=steps,
                    attack=attack,
                    at_steps=at_steps,
                    batch=subject.config.evaluate.batch,
                    seed=subject.config.seed,
                    precision=subject.config.evaluate.precision,
                    world=world,
                    progress=progress,
                )
            swept.curves[subject.name] = curves
            if world.first:
                told = {"attack": f"{attack}-{at_steps}", "curves": [c._asdict() for c in curves]}
                weights = subject.weights.stem if subject.weights else "as made"
                write_down(subject, "sweep", {"weights": weights} | told)
            for curve in curves:
                swept.warnings.extend(f"{subject.name}: {text}" for text in check_curve(*curve))
        return swept if world.first else None
