"""The report job: the error analysis that a run's report needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dat.config.build import make_world
from dat.config.model_spec import ModelSpec
from dat.config.runs import is_analyzed
from dat.config.trust import refuse_code
from dat.jobs.error_analysis import analyze_errors
from dat.jobs.evaluate import prepare
from dat.report import progress_bar


def look_closely(
    run: Path,
    images: int | None = None,
    *,
    edits: dict[str, Any] | None = None,
    trust: bool = False,
    quiet: bool = False,
) -> None:
    """Analyze a run's errors on this number of test images (default: evaluate.report images, unless
    that was done before). Does nothing if the run has no weights yet."""
    subject = ModelSpec.of_run(run, edits=edits, trust=True)  # checked below, if anything is built
    assert subject.weights is not None
    if not subject.weights.is_file() or (images is None and is_analyzed(run)):
        return
    if not trust:
        refuse_code(subject.config, edits or {}, run)
    images = subject.config.evaluate.report if images is None else images
    with make_world(subject.config) as world:
        data, model = prepare(subject, world)
        with progress_bar(f"error analysis of {subject.name}", show=not quiet) as progress:
            found = analyze_errors(
                subject.config, model, data, world, images=images, progress=progress
            )
        assert found is not None  # there is one worker
        found.write(run)
