"""MLflow: MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME set the destination."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from dat.train.loggers.base import BY_EPOCH, Logger, RunInfo, numbers

PARAMS = 100
METRICS = 1000
LONGEST = 500
"""Limits of a request: the number of settings, of metrics, and the length of a setting's value that
all versions accept."""


class MLflow(Logger):
    """One MLflow run per run of ours: a resumed run keeps its id.

    Metrics of steps are sent at the end of the epoch: a request per step would slow training down.
    """

    package = "mlflow"

    def begin(self, run: RunInfo) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(), Metric
        self._pending: list[Any] = []
        saved_id = run.saved_id("mlflow")
        if saved_id:
            self._id = saved_id
            self._client.update_run(saved_id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "dat")
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(name)
        )
        self._id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        run.save_id("mlflow", self._id)
        settings = [Param(key, str(value)[:LONGEST]) for key, value in run.settings().items()]
        for first in range(0, len(settings), PARAMS):
            self._client.log_batch(self._id, params=settings[first : first + PARAMS])

    def log(self, values: Mapping[str, float], step: int, *, by: str = BY_EPOCH) -> None:
        now = int(1000 * time.time())
        self._pending += [self._metric(key, value, now, step) for key, value in values.items()]
        if by == BY_EPOCH or len(self._pending) >= METRICS:
            self._send()

    def _send(self) -> None:
        pending, self._pending = self._pending, []
        for first in range(0, len(pending), METRICS):
            self._client.log_batch(self._id, metrics=pending[first : first + METRICS])

    def end(self, result: Mapping[str, Any] | None) -> None:
        if result is not None:
            self.log({f"result/{key}": value for key, value in numbers(result).items()}, 0)
        self._send()
        self._client.set_terminated(self._id, "FINISHED" if result is not None else "KILLED")
