"""Where a run's figures go while it runs: TensorBoard, Weights & Biases, MLflow.

To add one: a file here with a `Logger`, and a line below; `train.log` then takes its name.
"""

from collections.abc import Sequence

from dat.imports import require
from dat.loggers.base import Logger
from dat.loggers.mlflow import MLflow
from dat.loggers.tensorboard import TensorBoard
from dat.loggers.wandb import WandB

LOGGERS: dict[str, type[Logger]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def make_loggers(names: Sequence[str]) -> list[Logger]:
    """Those of that name, each once; refused where a package is missing."""
    for name in names:
        if name not in LOGGERS:
            raise ValueError(f"train.log = {name}: must be one of {', '.join(LOGGERS)}")
        require(LOGGERS[name].package, name, what=f"train.log = {name}")
    return [LOGGERS[name]() for name in dict.fromkeys(names)]


__all__ = ["LOGGERS", "Logger", "MLflow", "TensorBoard", "WandB", "make_loggers"]
