"""Fine-tuning: from a pre-trained model to a network for another task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dat import models
from dat.config.network import (
    bare,
    channels_of,
    head_classes_of,
    network_of,
    owner_of,
    resolve_pretrained,
    with_head,
)
from dat.config.schema import FinetuneConfig, ModelConfig, RunConfig, merge
from dat.config.trust import UntrustedCode, named_code, refuse_code
from dat.core.lazy import nn
from dat.optim import OptimizerSettings, scale_rates

if TYPE_CHECKING:
    import torch

    from dat.data import Splits
    from dat.models import Resized


FREE = {key: ModelConfig().dump()[key] for key in ("width", "activation", "args", "mean", "std")}
"""What a user may set about a model that is not of a run, and the defaults."""


@dataclass(frozen=True)
class PretrainedModel:
    """A pre-trained model: the weights of a run, or of a user's factory function."""

    name: str
    weights: Path | None
    """None: those that the library has for this name."""
    run: RunConfig | None = None

    def edits(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings, overridden by those that the pre-trained model determines."""
        requested = FinetuneConfig.read(settings.get("finetune", {}), "finetune")
        if requested.weights is not None:
            raise ValueError(f"finetune.weights = {requested.weights}: use --weights instead")
        free = FREE if self.run is None else {}
        model: dict[str, Any] = free | dict(settings.get("model", {}))
        for key, value in model.items():
            repeats = self.run is not None and (key, value) == ("name", self.run.model.name)
            if key not in free and not repeats:
                raise ValueError(
                    f"model.{key} = {value}: the network is that of {self.name}; omit this setting"
                )
        if self.weights is not None and not self.weights.is_file():
            raise ValueError(f"{self.weights}: no such weights")
        if self.run is not None:
            model = self.run.model.dump() | {"pretrained": False}
        elif models.is_library(self.name):  # its weights do not include the normalization
            weights = True if self.weights is None else str(self.weights)
            return merge(settings, {"model": model | {"name": self.name, "pretrained": weights}})
        else:
            model |= {"name": self.name}
        return merge(settings, {"model": model, "finetune": {"weights": str(self.weights)}})

    def refuse_code(self, given: Mapping[str, Any], data: str, *, sized: bool) -> None:
        """Refuse code that the run's folder names but the user's settings `given` do not: its
        network and, unless the image size is set (`sized`), data other than the training data."""
        if self.run is None:
            return
        refuse_code(self.run, given, self.name, only=("model.name",))
        own = named_code(self.run).get("data.name")
        if own and own != data and not sized and self.run.finetune.size is None:
            raise UntrustedCode(
                f"{self.name}: the run's config imports code: data.name = {own!r}. Set "
                "finetune.size, or, if you trust it, pass --trust to determine its image size"
            )

    def resolution(self) -> int | None:
        """The image size it was trained on, in pixels per side, if known."""
        from dat.data import load

        if self.run is None:
            if not models.is_library(self.name):
                return None
            return models.weights_info(self.name, {}).size
        if self.run.finetune.size is not None:
            return self.run.finetune.size
        try:
            return max(load(self.run.data.name, self.run.data.reading()).test.shape[1:])
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{self.name}: cannot determine its image size ({error}); set finetune.size"
            ) from None


def resolve_finetuning(
    config: RunConfig, data: Splits, resolution: Callable[[], int | None] | None = None
) -> RunConfig:
    """Resolve the settings that the pre-trained weights determine. Images smaller than
    `resolution` are upsampled to it, unless the config sets a size."""
    from dat.train import read_weights

    settings = config.finetune
    if config.model.pretrained:
        if settings.weights is not None:
            raise ValueError("model.pretrained and finetune.weights: give one of them")
        return _sized(resolve_pretrained(config, data), data, resolution)
    if settings.weights is None:
        if settings != FinetuneConfig():
            raise ValueError(
                "finetune.weights = none: specify weights to start from (dat finetune, or "
                "model.pretrained)"
            )
        return config
    path = Path(settings.weights).resolve()
    state = read_weights(path)
    module = owner_of(state, _pretrained(config, data))
    settings = replace(
        settings,
        weights=str(path),
        classes=settings.classes or head_classes_of(state, module),
        channels=settings.channels or channels_of(module, state) or data.test.channels,
    )
    return _sized(replace(config, finetune=settings), data, resolution)


def _sized(
    config: RunConfig, data: Splits, resolution: Callable[[], int | None] | None
) -> RunConfig:
    """The config with the size that images are upsampled to."""
    settings = config.finetune
    if settings.size is None and resolution is not None:
        size = resolution()
        if size is not None and size > max(data.test.shape[1:]):
            settings = replace(settings, size=size)
    _check_images(settings, data)
    return replace(config, finetune=settings)


def finetuned(config: RunConfig, data: Splits, *, start: bool) -> nn.Module:
    """The pre-trained network with a new head for this data; its config is already resolved.

    With `start`, load the pre-trained weights and freeze the layers that do not learn. Without, no
    file is read: the run's own weights will be loaded.
    """
    from dat.train import fill, read_weights

    model, settings = _pretrained(config, data), config.finetune
    if start:
        path = Path(str(settings.weights))
        state = read_weights(path)
        fill(owner_of(state, model), state, path)
    models.replace_head(model, data.test.classes, seed=config.seed)
    if start:
        models.freeze(bare(model), settings.layers)
    return model


def make_optimizer(
    config: RunConfig,
) -> OptimizerSettings | Callable[[nn.Module], torch.optim.Optimizer]:
    """The config's optimizer, with layer-wise learning rates if finetune.decay is set."""
    if config.finetune.decay == 1.0:
        return config.optimizer

    def layerwise(model: nn.Module) -> torch.optim.Optimizer:
        factors = models.rate_factors(model, config.finetune.decay)
        return scale_rates(config.optimizer(model, batch=config.train.batch), factors)

    return layerwise


def _pretrained(config: RunConfig, data: Splits) -> Resized:
    """The architecture of the pre-trained network, behind an identity normalization unless the
    settings give one: the weights of a run include theirs, and a user's model normalizes its images
    itself."""
    settings = config.finetune
    classes = settings.classes or data.test.classes
    channels = settings.channels or data.test.channels
    net = with_head(network_of(config, classes, channels), classes, config.seed)
    mean, std = config.model.mean or [0.0] * channels, config.model.std or [1.0] * channels
    model = models.normalized(net, mean, std)
    return models.Resized(model, settings.size, channels=channels)


def _check_images(settings: FinetuneConfig, data: Splits) -> None:
    channels, height, width = data.test.shape
    if channels not in (1, settings.channels):
        raise ValueError(
            f"finetune.channels = {settings.channels}: the images have {channels} channels: must "
            f"be {channels}; only gray images are repeated"
        )
    if settings.size is not None and settings.size < max(height, width):
        raise ValueError(
            f"finetune.size = {settings.size}: the images are {height} x {width}: must be at least "
            f"{max(height, width)}, or none"
        )
