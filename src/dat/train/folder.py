"""A run's folder: everything that is needed to know what was run and to measure it again.

config.yaml            every setting, resolved
environment.json       versions, machine, workers, threads
metrics.jsonl          one line an epoch
result.json            the final figures
warnings.txt           what the sentinel saw, if it saw something
best.safetensors       weights with the highest RA on the held-out images
last.safetensors       weights after the last whole epoch
ema-best/ema-last.*    the same of the averaged weights, where they are kept
examination.json       a closer look at the best weights: classes, mistakes, RA over eps and steps
gallery/               pictures of images, perturbations and adversarial images
measured.jsonl         what dat evaluate, certify and sweep found later, one line each
report.html            all of it, to look at
events/                TensorBoard, if train.log names it
loggers.json           by which id other loggers know the run
logs/                  one file a worker: where it was, and the error that ended it
checkpoints/           what it takes to go on, removed when the run is complete
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

from dat.comm import World
from dat.files import write_whole
from dat.train.records import EpochRecord, Listener
from dat.train.sentinel import Collapse
from dat.train.trainer import Trainer
from dat.train.weights import save_weights

CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
RESULT = "result.json"
WARNINGS = "warnings.txt"
EXAMINATION = "examination.json"
GALLERY = "gallery"
MEASURED = "measured.jsonl"
PAGE = "report.html"


class RunFolder(Listener):
    """Writes a run's files; only the first worker holds one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def check(path: Path, *, overwrite: bool = False) -> None:
        """Refuse a folder that cannot be written, or that holds something, unless it is a run that
        is to be overwritten."""
        above = next(it for it in (path, *path.absolute().parents) if it.exists())
        if not os.access(above, os.W_OK):
            raise ValueError(f"{path}: no permission to write in {above}: choose another --out")
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            is_run = (path / CONFIG).is_file()
            if not (overwrite and is_run):
                hint = "--overwrite to replace that run" if is_run else "remove it yourself"
                raise ValueError(f"{path} is in use: choose another --out, or {hint}")

    @classmethod
    def create(cls, path: Path, *, overwrite: bool = False) -> RunFolder:
        """A new, empty folder."""
        cls.check(path, overwrite=overwrite)
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True)
        return cls(path)

    def describe(self, config: dict[str, Any], world: World) -> None:
        """Write down what is about to run, and where."""
        write_whole(self.path / CONFIG, yaml.safe_dump(config, sort_keys=False).encode())
        _write_json(self.path / ENVIRONMENT, environment(world))

    def started(self, trainer: Trainer) -> None:
        lines = "".join(_line(record) for record in trainer.records)  # none after a checkpoint
        write_whole(self.path / METRICS, lines.encode())
        self._metrics = (self.path / METRICS).open("a")

    def epoch_ended(self, trainer: Trainer, record: EpochRecord) -> None:
        for name, model in trainer.whole_models().items():
            self._save(model, f"{name}last")
        self._metrics.write(_line(record))
        self._metrics.flush()

    def collapsed(self, trainer: Trainer, collapse: Collapse) -> None:
        with (self.path / WARNINGS).open("a") as file:
            file.write(f"{collapse}\n")

    def left_out_step(self, trainer: Trainer, reason: str, count: int) -> None:
        with (self.path / WARNINGS).open("a") as file:
            file.write(f"left out: {reason}\n")

    def best_found(self, trainer: Trainer, name: str, model: nn.Module) -> None:
        self._save(model, f"{name}best")

    def ended(self, trainer: Trainer) -> None:
        self._metrics.close()

    def finish(self, result: dict[str, Any]) -> None:
        """The final figures; their presence says that the run is complete."""
        _write_json(self.path / RESULT, result)
        shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)

    def _save(self, model: nn.Module, name: str) -> None:
        save_weights(model, self.path / f"{name}.safetensors")


def _line(record: EpochRecord) -> str:
    values = {key: value for key, value in record._asdict().items() if value is not None}
    return json.dumps(values) + "\n"


def environment(world: World) -> dict[str, Any]:
    """What might explain a difference between two runs."""
    import numpy

    from dat import __version__

    return {
        "dat": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "cpu": platform.processor() or platform.machine(),
        "cuda": torch.version.cuda,
        "workers": world.size,
        "threads": torch.get_num_threads(),
        **world.surroundings,
        "command": sys.argv[1:],
        "launch": os.environ.get("TORCHELASTIC_RUN_ID"),
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_whole(path, f"{json.dumps(value, indent=2)}\n".encode())
