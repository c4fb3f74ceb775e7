"""The certification job: the certified accuracy of a smoothed classifier."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dat.config.build import make_world
from dat.config.model_spec import ModelSpec
from dat.data import class_balanced_subset
from dat.distributed import World
from dat.evaluation.certification import Certified, certify, largest_radius
from dat.jobs.evaluate import prepare, write_down
from dat.report import progress_bar


@dataclass(frozen=True, kw_only=True)
class Certification:
    """The parameters of a certification."""

    sigma: float
    radii: tuple[float, ...] = ()
    fixed: bool = True
    n0: int = 100
    n: int = 100_000
    alpha: float = 0.001
    batch: int | None = None
    seed: int = 0

    def check(self) -> list[str]:
        """Warn about radii that cannot be certified with n samples."""
        if not self.sigma > 0 or not 0 < self.alpha < 0.5:
            return []  # refused later, by name
        most = largest_radius(self.sigma, self.n, self.alpha)
        return [
            f"r = {r:g} cannot be certified with sigma {self.sigma:g}, n = {self.n} and alpha "
            f"{self.alpha:g}: the largest possible radius is {most:.3g}"
            for r in self.radii
            if r > most
        ]


def certify_subject(
    subject: ModelSpec, asked: Certification, folder: Path | None = None, *, quiet: bool = False
) -> dict[str, Any] | None:
    """Certify a model on its test set, by all workers; the first gets the figures."""
    config = subject.config
    with make_world(config) as world:
        start = time.perf_counter()
        data, model = prepare(subject, world)
        with progress_bar(f"certifying {subject.name}", show=world.first and not quiet) as progress:
            found = certify(
                model,
                class_balanced_subset(data, config.evaluate.images),
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
    subject: ModelSpec, asked: Certification, found: Certified, world: World, seconds: float
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
