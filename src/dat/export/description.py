"""config.json: everything needed to rebuild a model, and its evaluation results."""

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
from dat.config.build import make_model
from dat.config.schema import RunConfig
from dat.core.files import atomic_write
from dat.core.smoothing import Smoothed
from dat.data import ImageData, Splits, is_known
from dat.models import Normalize

DESCRIPTION = "config.json"
LAYOUT = 1
"""Increased when the file changes in a way that older readers would misread."""


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """The description of an exported model, without paths of the machine it was trained on."""

    network: dict[str, Any]
    """The config groups `model` and `finetune`, which determine the network."""
    shape: tuple[int, int, int]
    """Channels, height and width of an image with pixels in [0, 1]."""
    classes: int
    names: tuple[str, ...]
    """Class names, if known."""
    mean: tuple[float, ...]
    """Normalization inside the model, per channel."""
    std: tuple[float, ...]
    smoothing: dict[str, Any] | None
    """Settings of the majority vote over noisy copies, if the model is smoothed."""
    threat: dict[str, Any]
    """The threat model of the training."""
    training: dict[str, Any]
    """How the model was trained."""
    figures: list[dict[str, Any]]
    """Evaluation results."""
    dat: str = __version__
    layout: int = LAYOUT

    def write(self, folder: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=2)
        atomic_write(folder / DESCRIPTION, f"{text}\n".encode())

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read an untrusted file: everything that the model is built from is checked."""
        path = folder / DESCRIPTION
        if not path.is_file():
            raise ValueError(
                f"{folder}: not an exported model (contains no {DESCRIPTION}): dat export RUN"
            )
        try:
            values = json.loads(path.read_text())
            names = {field.name for field in dataclasses.fields(cls)}
            description = cls(**{key: value for key, value in values.items() if key in names})
            description.placeholder_data(), description.settings()
            description.deployed(nn.Identity())
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"{path}: not written by dat export ({error})") from None
        if description.layout != LAYOUT:
            raise ValueError(f"{path}: layout = {description.layout}: must be {LAYOUT}; update dat")
        return description

    def placeholder_data(self) -> Splits:
        """Blank data of the right shape, which the network is built to fit."""
        channels, height, width = self.shape
        image = torch.zeros(1, channels, height, width)
        label = torch.zeros(1, dtype=torch.int64)
        data = ImageData.of(image, label, classes=self.classes, names=self.names)
        return Splits(data, data, tuple(self.mean), tuple(self.std))

    def settings(self) -> RunConfig:
        """The settings that determine the network."""
        return RunConfig.read({key: self.network[key] for key in ("model", "finetune")})

    def build(self, name: str | None = None) -> nn.Module:
        """The network without its weights; `name` overrides the name in the file."""
        config = self.settings()
        if name is not None:
            config = replace(config, model=replace(config.model, name=name))
        return make_model(config, self.placeholder_data())

    def deployed(self, model: nn.Module) -> nn.Module:
        """The model as deployed, smoothed if it was trained for that."""
        return Smoothed(model, **self.smoothing) if self.smoothing else model


def describe(
    config: RunConfig,
    data: Splits,
    model: nn.Module,
    *,
    training: Mapping[str, Any],
    figures: list[dict[str, Any]],
) -> ModelDescription:
    """Describe the model of a run, given without smoothing."""
    deployed, test = config.objective.deployed(model), data.test
    smoothing = None
    if isinstance(deployed, Smoothed):
        smoothing = {key: getattr(deployed, key) for key in ("sigma", "copies", "seed")}
    normalize = next(module for module in model.modules() if isinstance(module, Normalize))
    finetune = config.finetune.dump()
    if finetune["weights"] is not None:
        finetune["weights"] = Path(finetune["weights"]).name
    network = config.model.dump()
    if isinstance(network["pretrained"], str):
        network["pretrained"] = Path(network["pretrained"]).name
    groups = config.dump()
    kept = ("seed", "attack", "objective", "optimizer", "schedule", "train", "quantizer")
    about = {"data": data_name(config)} | {key: groups[key] for key in kept}
    return ModelDescription(
        network={"model": network, "finetune": finetune},
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
    """The dataset's name; of a path only the last component, which keeps the rest private."""
    name = config.data.name
    return name if is_known(name) or ":" in name else Path(name).name
