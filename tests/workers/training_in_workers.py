"""Training with M workers without the command line: a recipe's trainer, and its last weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset

from dat.config.build import make_trainer
from dat.config.recipes import read
from dat.config.schema import RunConfig, parse_edits
from dat.data import ImageData, load
from dat.distributed import World
from dat.jobs.train import resolve_protocol
from dat.models import build_model
from dat.train import save_weights
from tests.workers.forked import run_workers

TINY = (
    *("model.width=4", "attack.steps=3", "train.batch=408", "train.epochs=1"),
    *("train.select_steps=1", "comm.threads=1", "data.holdout=0.05"),
)
"""Settings with which the digits recipe takes a fraction of a second, and three steps per epoch."""
DOUBLE = f"model.name={__name__}:Double"
DATASET = f"data.name={__name__}:jittered"


class Double(nn.Module):
    """A network in double precision, where rounding flips no sign."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.net = build_model("cnn", classes, channels=1, width=4).double()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x.double())
        return logits


class Jittered(Dataset[Any]):
    """A map-style dataset of digits whose transform draws random numbers."""

    def __init__(self, data: ImageData) -> None:
        self.data, self.targets = data, data.labels.tolist()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        (image,), _ = self.data.batch(torch.tensor([row]), torch.device("cpu"))
        return image * (0.5 + torch.rand(()) / 2), self.targets[row]


def jittered() -> tuple[Jittered, Jittered]:
    splits = load("digits")
    return Jittered(splits.train), Jittered(splits.test)


def train_all(workers: int, folder: Path, runs: Mapping[str, Sequence[str]]) -> dict[str, Weights]:
    """Train the digits recipe with the settings of each run; the last weights by name."""
    run_workers(workers, _train_all, folder, dict(runs))
    return {name: load_file(folder / f"{name}-{workers}.safetensors") for name in runs}


Weights = dict[str, Tensor]


def _train_all(folder: Path, runs: Mapping[str, Sequence[str]]) -> None:
    configs = {name: config_of(words) for name, words in runs.items()}
    with World.join(threads=1) as world:
        for name, config in configs.items():
            trainer = make_trainer(config, load(config.data.name), world)
            resolve_protocol(trainer, quiet=True)
            trainer.fit()
            if world.first:
                save_weights(trainer.model, folder / f"{name}-{world.size}.safetensors")


def config_of(words: Sequence[str]) -> RunConfig:
    named = any(word.startswith("attack.name") for word in words)
    tiny = [word for word in TINY if not (named and word.startswith("attack.steps"))]
    return read("digits", parse_edits([*tiny, *words]))
