"""A run's folder: everything needed to know what was run and to evaluate it again.

config.yaml            every setting, with resolved defaults
environment.json       versions, machine, workers, threads
metrics.jsonl          one line per epoch
result.json            the final metrics
warnings.txt           collapses that train.sentinel detected, and skipped steps
best.safetensors       weights with the highest RA on the held-out images
last.safetensors       weights after the last complete epoch
ema-best/ema-last.*    the same for the moving average, if train.ema is set
examination.json       error analysis of the best weights: classes, confusions, RA by eps and steps
gallery/               clean images, perturbations and adversarial images
measured.jsonl         later results of dat evaluate, certify and sweep, one line each
report.html            the report on all of the above
events/                TensorBoard events, if train.log includes tensorboard
loggers.json           the run's ids in other loggers
logs/                  one file per worker: its progress, and the error that ended it
checkpoints/           checkpoints to resume from, removed when the run is complete
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from dat.core import devices
from dat.core.files import (
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    METRICS,
    RESULT,
    WARNINGS,
    atomic_write,
    check_output_folder,
)
from dat.distributed import World
from dat.train.callbacks import Callback
from dat.train.overfitting_monitor import Collapse
from dat.train.records import EpochRecord
from dat.train.trainer import Trainer
from dat.train.weights import save_weights

OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Variables that say how idle threads wait."""


class RunFolder(Callback):
    """Writes a run's files; only rank 0 has one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, *, overwrite: bool = False) -> RunFolder:
        """Create a new, empty folder."""
        check_output_folder(path, overwrite=overwrite)
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True)
        return cls(path)

    def describe(self, config: dict[str, Any], world: World) -> None:
        """Write the config and the environment."""
        atomic_write(self.path / CONFIG, yaml.safe_dump(config, sort_keys=False).encode())
        _write_json(self.path / ENVIRONMENT, environment(world))

    def on_fit_start(self, trainer: Trainer) -> None:
        # a resumed run drops epochs after its checkpoint
        lines = "".join(_line(record) for record in trainer.records)
        atomic_write(self.path / METRICS, lines.encode())
        self._metrics = (self.path / METRICS).open("a")

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        for name, model in trainer.unsharded_models().items():
            self._save(model, f"{name}last")
        self._metrics.write(_line(record))
        self._metrics.flush()

    def on_collapse(self, trainer: Trainer, collapse: Collapse) -> None:
        with (self.path / WARNINGS).open("a") as file:
            file.write(f"{collapse}\n")

    def on_step_skipped(self, trainer: Trainer, reason: str, count: int) -> None:
        with (self.path / WARNINGS).open("a") as file:
            file.write(f"skipped: {reason}\n")

    def on_new_best(self, trainer: Trainer, name: str, model: nn.Module) -> None:
        self._save(model, f"{name}best")

    def on_fit_end(self, trainer: Trainer) -> None:
        self._metrics.close()

    def finish(self, result: dict[str, Any]) -> None:
        """Write the final metrics, which mark the run as complete, and remove its checkpoints."""
        _write_json(self.path / RESULT, result)
        shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)

    def _save(self, model: nn.Module, name: str) -> None:
        save_weights(model, self.path / f"{name}.safetensors")


def _line(record: EpochRecord) -> str:
    values = {key: value for key, value in record._asdict().items() if value is not None}
    return json.dumps(values) + "\n"


def environment(world: World) -> dict[str, Any]:
    """Versions and hardware that may explain a difference between two runs."""
    import numpy

    from dat import __version__

    return {
        "dat": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "cpu": platform.processor() or platform.machine(),
        "gpu_runtime": devices.runtime_version(),
        "device": devices.device_name(world.device),
        "workers": world.size,
        "threads": torch.get_num_threads(),
        "openmp": {name: os.environ[name] for name in OPENMP if name in os.environ},
        **world.process_settings,
        "command": sys.argv[1:],
        "launch": os.environ.get("TORCHELASTIC_RUN_ID"),
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    atomic_write(path, f"{json.dumps(value, indent=2)}\n".encode())
