"""The sweep job: the RA of several models over eps and over the attack's steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dat.config.build import make_world
from dat.config.model_spec import ModelSpec
from dat.data import class_balanced_subset
from dat.evaluation import Curve, sweep
from dat.evaluation.checks import check_curve
from dat.jobs.evaluate import prepare, write_down
from dat.report import progress_bar


def default_eps(subjects: Sequence[ModelSpec]) -> tuple[float, ...]:
    """Nine radii up to twice the first model's eps; for linf at most 1."""
    threat = subjects[0].config.threat
    radii = (threat.eps * quarter / 4 for quarter in range(9))
    return tuple(eps for eps in radii if threat.norm != "linf" or eps <= 1)


class Swept(NamedTuple):
    """The curves of several models, and warnings about them."""

    curves: dict[str, list[Curve]]
    warnings: list[str]


def sweep_all(
    subjects: Sequence[ModelSpec],
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
            with progress_bar(
                f"sweeping {subject.name}", show=world.first and not quiet
            ) as progress:
                curves = sweep(
                    subject.config.objective.deployed(model),
                    class_balanced_subset(data, subject.config.evaluate.images),
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
