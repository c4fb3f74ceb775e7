"""Training: Algorithm 1 (`step.py`), the loop around it, and what a run leaves behind."""

from dat.train.folder import RunFolder
from dat.train.step import NotFinite, StepReport, Worker, dat_step
from dat.train.trainer import EpochRecord, Listener, Trainer
from dat.train.weights import fill, load_weights, read_weights, save_weights

__all__ = [
    "EpochRecord",
    "Listener",
    "NotFinite",
    "RunFolder",
    "StepReport",
    "Trainer",
    "Worker",
    "dat_step",
    "fill",
    "load_weights",
    "read_weights",
    "save_weights",
]
