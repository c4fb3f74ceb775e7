"""Fine-tuning: from a pre-trained model to a network for another task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dat import models
from dat.config.schema import FinetuneConfig, RunConfig, merge
from dat.config.trust import UntrustedCode, named_code, refuse_code
from dat.core.lazy import nn
from dat.optim import OptimizerSettings, scale_rates

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dat.data import Splits
    from dat.models import Resized


@dataclass(frozen=True)
class PretrainedModel:
    """A pre-trained model: the weights of a run, or of a user's factory function."""

    name: str
    weights: Path
    run: RunConfig | None = None

    def edits(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings, overridden by those that the pre-trained model determines."""
        requested = FinetuneConfig.read(settings.get("finetune", {}), "finetune")
        if requested.weights is not None:
            raise ValueError(f"finetune.weights = {requested.weights}: use --weights instead")
        free = {"width": None} if self.run is None else {}
        model: dict[str, Any] = free | dict(settings.get("model", {}))
        for key, value in model.items():
            repeats = self.run is not None and (key, value) == ("name", self.run.model.name)
            if key not in free and not repeats:
                raise ValueError(
                    f"model.{key} = {value}: the network is that of {self.name}; omit this setting"
                )
        if not self.weights.is_file():
            raise ValueError(f"{self.weights}: no such weights")
        model = model | {"name": self.name} if self.run is None else self.run.model.dump()
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
            return None
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
    if settings.weights is None:
        if settings != FinetuneConfig():
            raise ValueError(
                "finetune.weights = none: specify weights to start from (dat finetune)"
            )
        return config
    path = Path(settings.weights).resolve()
    state = read_weights(path)
    module = _owner_of(state, _pretrained(config, data))
    name, head = models.find_head(module)
    rows = state.get(f"{name}.weight")
    classes = models.head_classes(head) if rows is None else len(rows)
    channels = settings.channels or _channels(module, state) or data.test.channels
    size = settings.size
    if size is None and resolution is not None:
        size = resolution()
        size = size if size is not None and size > max(data.test.shape[1:]) else None
    settings = replace(
        settings,
        weights=str(path),
        classes=settings.classes or classes,
        channels=channels,
        size=size,
    )
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
        fill(_owner_of(state, model), state, path)
    models.replace_head(model, data.test.classes, seed=config.seed)
    if start:
        models.freeze(_bare(model), settings.layers)
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
    """The architecture of the pre-trained network, behind an identity normalization: the weights of
    a run include theirs, and a user's model normalizes its images itself."""
    settings = config.finetune
    classes = settings.classes or data.test.classes
    channels = settings.channels or data.test.channels
    net = models.build_model(
        config.model.name, classes, channels=channels, width=config.model.width, seed=config.seed
    )
    _, head = models.find_head(net)
    if models.head_classes(head) != classes:  # a factory with a fixed number of classes
        net = models.replace_head(net, classes, seed=config.seed)
    model = models.normalized(net, [0.0] * channels, [1.0] * channels)
    return models.Resized(model, settings.size, channels=channels)


def _bare(model: Resized) -> nn.Module:
    return model.net.get_submodule("net")


def _owner_of(state: Mapping[str, Tensor], model: Resized) -> nn.Module:
    """The module that a state dict belongs to: the bare network, the normalized one, or that of a
    fine-tuned run. It is the one with the most names in common."""
    candidates = (_bare(model), model.net, model)
    return max(candidates, key=lambda module: len(module.state_dict().keys() & state.keys()))


def _channels(model: nn.Module, state: Mapping[str, Tensor]) -> int | None:
    """The number of image channels that the weights expect."""
    for name, module in model.named_modules():
        if isinstance(module, models.Normalize) and f"{name}.mean" in state:
            return len(state[f"{name}.mean"])
        if isinstance(module, nn.Conv2d) and f"{name}.weight" in state:
            return state[f"{name}.weight"].shape[1] * module.groups
    return None


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
