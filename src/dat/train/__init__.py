"""Training: Algorithm 1 (`step.py`), the training loop, its options, and a run's folder."""

from typing import TYPE_CHECKING

from dat.core.lazy import lazy_names
from dat.train.options import Options
from dat.train.part import Option, Part

if TYPE_CHECKING:
    from dat.train.callbacks import Callback
    from dat.train.checkpointer import Checkpoint, Checkpointer
    from dat.train.data import TrainingData
    from dat.train.errors import NotFinite, Preempted
    from dat.train.exchange import GradientExchange
    from dat.train.folder import RunFolder
    from dat.train.logged import Logged
    from dat.train.records import EpochRecord
    from dat.train.sharding import Sharding
    from dat.train.step import StepReport, dat_step
    from dat.train.trainer import Trainer
    from dat.train.weights import fill, load_weights, read_weights, save_weights
    from dat.train.worker import Worker
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        renamed={"Listener": "Callback", "Resumption": "Checkpoint", "Saver": "Checkpointer"},
        callbacks="Callback",
        checkpointer="Checkpoint Checkpointer",
        data="TrainingData",
        errors="NotFinite Preempted",
        exchange="GradientExchange",
        folder="RunFolder",
        logged="Logged",
        records="EpochRecord",
        sharding="Sharding",
        step="StepReport dat_step",
        trainer="Trainer",
        weights="fill load_weights read_weights save_weights",
        worker="Worker",
    )

__all__ = [
    "Callback",
    "Checkpoint",
    "Checkpointer",
    "EpochRecord",
    "GradientExchange",
    "Logged",
    "NotFinite",
    "Option",
    "Options",
    "Part",
    "Preempted",
    "RunFolder",
    "Sharding",
    "StepReport",
    "Trainer",
    "TrainingData",
    "Worker",
    "dat_step",
    "fill",
    "load_weights",
    "read_weights",
    "save_weights",
]
