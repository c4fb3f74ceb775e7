"""A model to evaluate: a run's, or any other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dat.config.runs import read_run
from dat.config.schema import RunConfig, merge
from dat.core.files import WEIGHTS
from dat.models import is_library
from dat.objectives import Noisy

if TYPE_CHECKING:
    from torch import nn

    from dat.data import Splits


@dataclass(frozen=True)
class ModelSpec:
    """A model to evaluate, and how to build it."""

    name: str
    config: RunConfig
    weights: Path | None
    is_run: bool
    """The model comes from a run of DAT, with the run's normalization. Otherwise, `model.name` is a
    factory of a complete model, from images in [0, 1] to logits."""

    def folder(self, kind: str) -> Path:
        """The folder for results of this kind."""
        return Path(self.name) / kind if self.is_run else Path(kind) / self.name

    @classmethod
    def of_run(
        cls,
        run: Path,
        weights: str = "best",
        edits: dict[str, Any] | None = None,
        *,
        trust: bool = False,
    ) -> ModelSpec:
        """The model of a run; code that its folder names must be in the edits, or trusted."""
        _, config = read_run(run, edits, trust=trust)
        file = run / f"{weights}.safetensors" if weights in WEIGHTS else Path(weights)
        return cls(str(run), config, file, True)

    @classmethod
    def of_model(
        cls, factory: str, weights: Path | None, data: str, edits: dict[str, Any] | None = None
    ) -> ModelSpec:
        """A factory of a complete model, or a library's network: its normalization is put in front
        of it, and without a file, its weights are those that the library has."""
        settings = merge(edits or {}, {"data": {"name": data}})
        model = {**settings.get("model", {}), "name": factory}
        if is_library(factory):
            model = {"pretrained": True if weights is None else str(weights)} | model
        settings["model"] = model
        name = factory.rpartition(":")[2]
        config = RunConfig.read(settings)
        return cls(name, config, weights, False)

    def make(self, data: Splits) -> nn.Module:
        """Build the model and load its weights."""
        from dat.config.build import make_model
        from dat.config.network import network_of, pretrained_as_is
        from dat.models import normalized
        from dat.train import load_weights

        if self.is_run:
            model = make_model(self.config, data)
        elif self.config.model.pretrained:
            return pretrained_as_is(self.config, data)
        else:
            model = network_of(self.config, data.test.classes, data.test.channels)
        if self.weights is not None:
            load_weights(model, self.weights)
        mean, std = self.config.model.mean, self.config.model.std
        if not self.is_run and mean is not None and std is not None:
            model = normalized(model, mean, std)
        return model


def training_sigma(spec: ModelSpec) -> float | None:
    """The standard deviation of the noise that a run was trained with, if any."""
    objective = spec.config.objective
    return objective.sigma if spec.is_run and isinstance(objective, Noisy) else None
