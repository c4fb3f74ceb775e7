"""config.json: what it takes to build a model again, and what is known of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from dat import __version__
from dat.build import make_model
from dat.config import RunConfig
from dat.data import ImageData, Splits, is_known
from dat.files import write_whole
from dat.models import Normalize
from dat.smoothing import Smoothed

FACTS = "config.json"
LAYOUT = 1
"""Raised when the file changes so that older readers would misread it."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A model's description, as people and `dat.load` read it. It names no path of the machine that
    it was trained on."""

    network: dict[str, Any]
    """`model` and `finetune`, groups of a config that decide what is built."""
    shape: tuple[int, int, int]
    """Channels, height and width of an image, whose pixels are in [0, 1]."""
    classes: int
    names: tuple[str, ...]
    """Of the classes, if they have any."""
    mean: tuple[float, ...]
    """By which the model normalises, inside."""
    std: tuple[float, ...]
    smoothing: dict[str, Any] | None
    """Noisy copies that vote, if that is how it answers."""
    threat: dict[str, Any]
    """What it was trained to withstand."""
    training: dict[str, Any]
    """How it came about."""
    figures: list[dict[str, Any]]
    """What was measured."""
    dat: str = __version__
    layout: int = LAYOUT

    def write(self, folder: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=2)
        write_whole(folder / FACTS, f"{text}\n".encode())

    @classmethod
    def read(cls, folder: Path) -> Self:
        """What somebody else may have written: every part that a model is built from is checked."""
        path = folder / FACTS
        if not path.is_file():
            raise ValueError(f"{folder}: no exported model (no {FACTS} in it): dat export RUN")
        try:
            values = json.loads(path.read_text())
            names = {field.name for field in dataclasses.fields(cls)}
            facts = cls(**{key: value for key, value in values.items() if key in names})
            facts.blank(), facts.settings(), facts.deployed(nn.Identity())
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"{path}: not as dat export writes it ({error})") from None
        if facts.layout != LAYOUT:
            raise ValueError(f"{path}: layout = {facts.layout}: must be {LAYOUT}; update dat")
        return facts

    def blank(self) -> Splits:
        """Data of the right shape, for what is built to fit data."""
        channels, height, width = self.shape
        image = torch.zeros(1, channels, height, width)
        label = torch.zeros(1, dtype=torch.int64)
        data = ImageData.of(image, label, classes=self.classes, names=self.names)
        return Splits(data, data, tuple(self.mean), tuple(self.std))

    def settings(self) -> RunConfig:
        """Those that decide what is built."""
        return RunConfig.read({key: self.network[key] for key in ("model", "finetune")})

    def build(self, name: str | None = None) -> nn.Module:
        """The network without its weights; `name` in place of the one that the file has."""
        config = self.settings()
        if name is not None:
            config = replace(config, model=replace(config.model, name=name))
        return make_model(config, self.blank())

    def deployed(self, model: nn.Module) -> nn.Module:
        """The model as it answers."""
        return Smoothed(model, **self.smoothing) if self.smoothing else model


def describe(
    config: RunConfig,
    data: Splits,
    model: nn.Module,
    *,
    training: Mapping[str, Any],
    figures: list[dict[str, Any]],
) -> Facts:
    """The facts of a run's bare model."""
    deployed, test = config.objective.deployed(model), data.test
    smoothing = None
    if isinstance(deployed, Smoothed):
        smoothing = {key: getattr(deployed, key) for key in ("sigma", "copies", "seed")}
    normalize = next(it for it in model.modules() if isinstance(it, Normalize))
    finetune = config.finetune.dump()
    if finetune["weights"] is not None:
        finetune["weights"] = Path(finetune["weights"]).name
    groups = config.dump()
    kept = ("seed", "attack", "objective", "optimizer", "schedule", "train", "quantizer")
    about = {"data": data_name(config)} | {key: groups[key] for key in kept}
    return Facts(
        network={"model": config.model.dump(), "finetune": finetune},
        shape=test.shape,
        classes=test.classes,
        names=test.names,
        mean=tuple(normalize.mean.flatten().tolist()),
        std=tuple(normalize.std.flatten().tolist()),
        smoothing=smoothing,
        threat=config.threat.dump(),
        training={**training, **about},
        figures=figures,
    )


def data_name(config: RunConfig) -> str:
    """The set's name; of a file or folder the last word, as the rest is nobody's business."""
    name = config.data.name
    return name if is_known(name) or ":" in name else Path(name).name
