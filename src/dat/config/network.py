"""The network of a config, and the weights that it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dat import models
from dat.config.schema import ModelConfig, RunConfig
from dat.core.lazy import nn

if TYPE_CHECKING:
    from torch import Tensor

    from dat.data import Splits
    from dat.models import Resized


def network_of(
    config: RunConfig, classes: int, channels: int, *, pretrained: bool = False
) -> nn.Module:
    """The network with a head for `classes`, without normalization; `pretrained` loads the weights
    that a library has for it."""
    model = config.model
    return models.build_model(
        model.name,
        classes,
        channels=channels,
        width=model.width,
        seed=config.seed,
        activation=model.activation,
        args=model.args,
        pretrained=pretrained,
    )


def with_head(net: nn.Module, classes: int, seed: int) -> nn.Module:
    """The network with a head for `classes`; one that has another number gets a new head."""
    _, head = models.find_head(net)
    if models.head_classes(head) == classes:
        return net
    return models.replace_head(net, classes, seed=seed)


def resolve_pretrained(config: RunConfig, data: Splits) -> RunConfig:
    """Record what the pre-trained weights determine, so that the network can be built again without
    them: the normalization, and the numbers of channels and classes."""
    from dat.train import read_weights

    model, statistics = config.model, None
    if model.pretrained is True:
        info = models.weights_info(model.name, model.args)
        channels, classes = info.channels, info.classes
    else:
        path = Path(str(model.pretrained)).resolve()
        model = replace(model, pretrained=str(path))
        state = read_weights(path)
        test = data.test
        net = network_of(config, test.classes, test.channels)
        module = owner_of(state, _wrapped(config, net, test.channels))
        classes = head_classes_of(state, module)
        channels = channels_of(module, state) or data.test.channels
        statistics = _statistics_in(state, module)
    mean, std = statistics or _statistics(model)
    if len(mean) != channels:
        raise ValueError(
            f"model.mean: has {len(mean)} channels, and the weights {channels}: set model.mean and "
            "model.std to one number per channel"
        )
    model = replace(model, mean=mean, std=std)
    finetune = replace(config.finetune, channels=channels, classes=classes)
    return replace(config, model=model, finetune=finetune)


def pretrained_model(config: RunConfig, data: Splits, *, start: bool) -> Resized:
    """The network of a resolved config with `model.pretrained`, with a new head if the weights are
    of other classes. Without `start`, no weights are read: the run's own will be loaded."""
    from dat.train import fill, read_weights

    model, settings, classes = config.model, config.finetune, data.test.classes
    channels = settings.channels or data.test.channels
    path = None if model.pretrained is True else Path(str(model.pretrained))
    built = settings.classes if start and path and settings.classes else classes
    net = network_of(config, built, channels, pretrained=start and path is None)
    complete = _wrapped(config, with_head(net, built, config.seed), channels)
    if start and path:
        state = read_weights(path)
        fill(owner_of(state, complete), state, path)
        with_head(complete, classes, config.seed)
    if start:
        models.freeze(bare(complete), settings.layers)
    return complete


def pretrained_as_is(config: RunConfig, data: Splits) -> Resized:
    """The network with its pre-trained weights and their head, to be evaluated."""
    resolved = resolve_pretrained(config, data)
    classes = resolved.finetune.classes
    if classes != data.test.classes:
        raise ValueError(
            f"model.pretrained: the weights have {classes} classes, and the data "
            f"{data.test.classes}: fine-tune the model first (dat finetune)"
        )
    return pretrained_model(resolved, data, start=True)


def _wrapped(config: RunConfig, net: nn.Module, channels: int) -> Resized:
    """The network behind its normalization, which takes images of any number of channels."""
    mean, std = config.model.mean or [0.0] * channels, config.model.std or [1.0] * channels
    return models.Resized(
        models.normalized(net, mean, std), config.finetune.size, channels=channels
    )


def _statistics(model: ModelConfig) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The normalization that the settings give, or the library that the network is from."""
    if model.mean is not None and model.std is not None:
        return model.mean, model.std
    if not models.is_library(model.name):
        raise ValueError(
            f"{model.pretrained}: does not say how its network normalizes images; set model.mean "
            "and model.std (0 and 1 per channel: not at all)"
        )
    info = models.weights_info(model.name, model.args)
    return info.mean, info.std


def _statistics_in(
    state: Mapping[str, Tensor], module: nn.Module
) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """The normalization that is part of the weights, as in those of a run."""
    for name, normalize in module.named_modules():
        mean, std = (state.get(f"{name}.{key}".lstrip(".")) for key in ("mean", "std"))
        if isinstance(normalize, models.Normalize) and mean is not None and std is not None:
            return tuple(mean.flatten().tolist()), tuple(std.flatten().tolist())
    return None


def bare(model: Resized) -> nn.Module:
    """The network without what is in front of it."""
    return model.net.get_submodule("net")


def owner_of(state: Mapping[str, Tensor], model: Resized) -> nn.Module:
    """The module that a state dict belongs to: the bare network, one that it wraps, the normalized
    one, or that of a fine-tuned run. It is the one with the most names in common."""
    candidates = [bare(model)]
    while isinstance(inner := getattr(candidates[-1], "net", None), nn.Module):
        candidates.append(inner)
    candidates += [model.net, model]
    return max(candidates, key=lambda module: len(module.state_dict().keys() & state.keys()))


def head_classes_of(state: Mapping[str, Tensor], module: nn.Module) -> int:
    """The number of classes of the weights."""
    name, head = models.find_head(module)
    rows = state.get(f"{name}.weight".lstrip("."))
    return models.head_classes(head) if rows is None else len(rows)


def channels_of(model: nn.Module, state: Mapping[str, Tensor]) -> int | None:
    """The number of image channels that the weights expect."""
    for name, module in model.named_modules():
        if isinstance(module, models.Normalize) and f"{name}.mean" in state:
            return len(state[f"{name}.mean"])
        if isinstance(module, nn.Conv2d) and f"{name}.weight" in state:
            return state[f"{name}.weight"].shape[1] * module.groups
    return None
