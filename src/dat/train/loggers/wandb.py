"""Weights & Biases: WANDB_PROJECT, WANDB_MODE and its other variables set the destination."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import Any

from dat.train.loggers.base import BY_EPOCH, BY_STEP, Logger, RunInfo


class WandB(Logger):
    """One W&B run per run of ours: a resumed run keeps its id."""

    package = "wandb"

    def begin(self, run: RunInfo) -> None:
        import wandb

        saved_id = run.saved_id("wandb")
        id = saved_id or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "dat"),
            name=os.environ.get("WANDB_NAME", run.name),
            dir=str(run.folder),
            config=dict(run.config),
            id=id,
            resume="allow" if saved_id else None,
        )
        run.save_id("wandb", id)
        for by, names in ((BY_STEP, "step/*"), (BY_EPOCH, "*")):
            self._run.define_metric(by, hidden=True)
            self._run.define_metric(names, step_metric=by)

    def log(self, values: Mapping[str, float], step: int, *, by: str = BY_EPOCH) -> None:
        self._run.log({**values, by: step})

    def end(self, result: Mapping[str, Any] | None) -> None:
        if result is not None:
            self._run.summary.update({f"result/{key}": value for key, value in result.items()})
        self._run.finish(exit_code=0 if result is not None else 1)
