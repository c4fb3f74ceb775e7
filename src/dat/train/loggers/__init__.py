"""Loggers of a run's metrics: TensorBoard, Weights & Biases, MLflow.

To add one, write a `Logger` in a file here and add a line below; `train.log` then accepts its name.
"""

from collections.abc import Sequence

from dat.core.imports import require
from dat.train.loggers.base import Logger
from dat.train.loggers.mlflow import MLflow
from dat.train.loggers.tensorboard import TensorBoard
from dat.train.loggers.wandb import WandB

LOGGERS: dict[str, type[Logger]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def make_loggers(names: Sequence[str]) -> list[Logger]:
    """Create the loggers of these names, each once; a ValueError if a package is missing."""
    for name in names:
        if name not in LOGGERS:
            raise ValueError(f"train.log = {name}: must be one of {', '.join(LOGGERS)}")
        require(LOGGERS[name].package, name, what=f"train.log = {name}")
    return [LOGGERS[name]() for name in dict.fromkeys(names)]


__all__ = ["LOGGERS", "Logger", "MLflow", "TensorBoard", "WandB", "make_loggers"]
