"""Training: Algorithm 1 (`step.py`), the loop around it, and what a run leaves behind."""

from dat.train.folder import RunFolder
from dat.train.logged import Logged
from dat.train.records import EpochRecord, Listener
from dat.train.resume import Preempted, Resumption, Saver
from dat.train.step import NotFinite, StepReport, Worker, dat_step
from dat.train.trainer import Trainer
from dat.train.weights import fill, load_weights, read_weights, save_weights

__all__ = [
    "EpochRecord",
    "Listener",
    "Logged",
    "NotFinite",
    "Preempted",
    "Resumption",
    "RunFolder",
    "Saver",
    "StepReport",
    "Trainer",
    "Worker",
    "dat_step",
    "fill",
    "load_weights",
    "read_weights",
    "save_weights",
]
