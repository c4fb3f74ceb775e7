"""A network by its name: one of ours, or the user's own as `package.module:factory`."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import nn

from dat.fields import did_you_mean
from dat.imports import call, find_callable
from dat.models.cnn import mnist_cnn, small_cnn
from dat.models.preact_resnet import preact_resnet18
from dat.models.resnet import resnet50
from dat.models.vit import vit_4, vit_16
from dat.models.wide_resnet import wrn_28_10
from dat.rng import derive

Factory = Callable[..., nn.Module]

MODELS: dict[str, Factory] = {
    "cnn": small_cnn,
    "mnist-cnn": mnist_cnn,
    "preact-resnet18": preact_resnet18,
    "resnet50": resnet50,
    "wrn-28-10": wrn_28_10,
    "vit-4": vit_4,
    "vit-16": vit_16,
}


def build_model(
    name: str, classes: int, *, channels: int = 3, width: int | None = None, seed: int = 0
) -> nn.Module:
    """The network called `name`, its weights a function of `seed` alone.

    A user's factory is given those of classes, channels and width that its signature has; a width
    of none is left to the factory's own default.
    """
    sizes = {"classes": classes, "channels": channels}
    if width is not None:
        sizes["width"] = width
    for size, value in sizes.items():
        if value < 1:
            raise ValueError(f"{size} = {value}: must be at least 1")
    with torch.random.fork_rng(devices=[]):
        factory = find_callable(name, what="model.name") if ":" in name else _look_up(name)
        # not torch.manual_seed, which would also reseed the GPUs; networks are made on the CPU
        torch.default_generator.manual_seed(derive(seed, "weights"))
        return _call(factory, name, sizes=sizes)


def _look_up(name: str) -> Factory:
    if name not in MODELS:
        raise ValueError(
            f"model.name = {name!r}: unknown{did_you_mean(name, MODELS)} "
            "(your own is written package.module:name)"
        )
    return MODELS[name]


def _call(factory: Factory, name: str, *, sizes: dict[str, int]) -> nn.Module:
    what = f"model.name = {name!r}"
    net = call(factory, what=what, **_accepted(factory, sizes))
    if not isinstance(net, nn.Module):
        raise ValueError(
            f"{what}: the factory gave a {type(net).__name__}; it must return an nn.Module"
        )
    return net


def _accepted(factory: Factory, sizes: dict[str, int]) -> dict[str, int]:
    parameters = inspect.signature(factory).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return sizes
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = {parameter.name for parameter in parameters if parameter.kind in by_keyword}
    return {size: value for size, value in sizes.items() if size in names}
