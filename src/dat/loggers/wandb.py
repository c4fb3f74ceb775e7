"""Weights & Biases: WANDB_PROJECT, WANDB_MODE and its other variables say where figures go."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import Any

from dat.loggers.base import BY_EPOCH, BY_STEP, Logger, Run


class WandB(Logger):
    """One run of theirs for one of ours: a run that is resumed goes on with the same id."""

    package = "wandb"

    def begin(self, run: Run) -> None:
        import wandb

        known = run.kept("wandb")
        id = known or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "dat"),
            name=os.environ.get("WANDB_NAME", run.name),
            dir=str(run.folder),
            config=dict(run.config),
            id=id,
            resume="allow" if known else None,
        )
        run.keep("wandb", id)
        for by, names in ((BY_STEP, "step/*"), (BY_EPOCH, "*")):
            self._run.define_metric(by, hidden=True)
            self._run.define_metric(names, step_metric=by)

    def log(self, values: Mapping[str, float], step: int, *, by: str = BY_EPOCH) -> None:
        self._run.log({**values, by: step})

    def end(self, result: Mapping[str, Any] | None) -> None:
        if result is not None:
            self._run.summary.update({f"result/{key}": value for key, value in result.items()})
        self._run.finish(exit_code=0 if result is not None else 1)
