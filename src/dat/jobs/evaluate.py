"""The evaluation job: a run, or any model, under attack."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from torch import nn

from dat.config.build import accuracy_of, check_attacks, figures, make_world
from dat.config.model_spec import ModelSpec
from dat.core.files import MEASURED
from dat.data import ImageData, load
from dat.distributed import World
from dat.evaluation import Assessment
from dat.report import progress_bar


def measure(
    subject: ModelSpec,
    folder: Path | None = None,
    *,
    check: bool = True,
    keep: bool = False,
    bundle: Path | None = None,
    quiet: bool = False,
) -> dict[str, Any] | None:
    """Measure a model on its test set, by all workers; the first gets the figures."""
    with make_world(subject.config) as world:
        start = time.perf_counter()
        data, model = prepare(subject, world)
        with progress_bar(f"evaluating {subject.name}", show=world.first and not quiet) as progress:
            found = accuracy_of(
                subject.config,
                model,
                data,
                world,
                folder=folder,
                keep=keep,
                bundle=bundle,
                check=check,
                progress=progress,
            )
        seconds = time.perf_counter() - start
        if not world.first:
            return None
        report = _report(subject, found, world, seconds)
        report |= {"bundle": str(bundle)} if bundle else {}
        if folder:
            write_down(subject, "evaluate", report)
        return report


def prepare(subject: ModelSpec, world: World) -> tuple[ImageData, nn.Module]:
    """The test images and the model, or one error for all workers."""
    data = world.run_or_fail_together(
        lambda: load(subject.config.data.name, subject.config.data.reading())
    )
    world.run_or_fail_together(lambda: check_attacks(subject.config, data.test.classes))
    model = world.run_or_fail_together(lambda: subject.make(data))
    return data.test, model.to(world.device)


def write_down(subject: ModelSpec, kind: str, found: dict[str, Any]) -> None:
    """Add what was measured to the run's folder, for its report."""
    if subject.is_run:
        with (Path(subject.name) / MEASURED).open("a") as file:
            file.write(json.dumps({"kind": kind} | found) + "\n")


def _report(subject: ModelSpec, found: Assessment, world: World, seconds: float) -> dict[str, Any]:
    suites = {
        name: {
            "ra": found.ra(name),
            "fell": result.counts(),
            "costs": {attack: cost._asdict() for attack, cost in result.costs.items()},
        }
        for name, result in found.suites.items()
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
