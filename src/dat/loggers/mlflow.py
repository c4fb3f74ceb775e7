"""MLflow: MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say where figures go."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from dat.loggers.base import BY_EPOCH, Logger, Run, numbers

PARAMS = 100
METRICS = 1000
LONGEST = 500
"""What a request may hold: settings, figures, and the characters of a setting that all versions
take."""


class MLflow(Logger):
    """One run of theirs for one of ours: a run that is resumed goes on with the same id.

    Figures of steps wait for the end of the epoch: a request a step would slow training down.
    """

    package = "mlflow"

    def begin(self, run: Run) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(), Metric
        self._waiting: list[Any] = []
        known = run.kept("mlflow")
        if known:
            self._id = known
            self._client.update_run(known, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "dat")
        experiment = self._client.get_experiment_by_name(name)
        place = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._id = self._client.create_run(place, run_name=run.name).info.run_id
        run.keep("mlflow", self._id)
        settings = [Param(key, str(value)[:LONGEST]) for key, value in run.settings().items()]
        for first in range(0, len(settings), PARAMS):
            self._client.log_batch(self._id, params=settings[first : first + PARAMS])

    def log(self, values: Mapping[str, float], step: int, *, by: str = BY_EPOCH) -> None:
        now = int(1000 * time.time())
        self._waiting += [self._metric(key, value, now, step) for key, value in values.items()]
        if by == BY_EPOCH or len(self._waiting) >= METRICS:
            self._send()

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for first in range(0, len(waiting), METRICS):
            self._client.log_batch(self._id, metrics=waiting[first : first + METRICS])

    def end(self, result: Mapping[str, Any] | None) -> None:
        if result is not None:
            self.log({f"result/{key}": value for key, value in numbers(result).items()}, 0)
        self._send()
        self._client.set_terminated(self._id, "FINISHED" if result is not None else "KILLED")
