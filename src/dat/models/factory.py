"""A network by its name: one of ours, or the user's own as `package.module:factory`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

from dat.core.imports import call, import_callable
from dat.core.lazy import nn, torch
from dat.core.rng import derive
from dat.core.settings import did_you_mean

Factory = Callable[..., "nn.Module"]

MODELS = {
    "cnn": "dat.models.cnn:small_cnn",
    "mnist-cnn": "dat.models.cnn:mnist_cnn",
    "preact-resnet18": "dat.models.preact_resnet:preact_resnet18",
    "resnet50": "dat.models.resnet:resnet50",
    "wrn-28-10": "dat.models.wide_resnet:wrn_28_10",
    "vit-4": "dat.models.vit:vit_4",
    "vit-16": "dat.models.vit:vit_16",
}
"""The networks of this package, imported on first use."""


def build_model(
    name: str, classes: int, *, channels: int = 3, width: int | None = None, seed: int = 0
) -> nn.Module:
    """Build the network called `name`; its initial weights depend on `seed` alone.

    A user's factory receives those of classes, channels and width that its signature accepts; if
    width is None, the factory's own default applies.
    """
    sizes = {"classes": classes, "channels": channels}
    if width is not None:
        sizes["width"] = width
    for size, value in sizes.items():
        if value < 1:
            raise ValueError(f"{size} = {value}: must be at least 1")
    with torch.random.fork_rng(devices=[]):
        factory = find_factory(name)
        # not torch.manual_seed, which would also reseed the GPUs; networks are built on the CPU
        torch.default_generator.manual_seed(derive(seed, "weights"))
        return _call(factory, name, sizes=sizes)


def find_factory(name: str) -> Factory:
    """The factory of a network of this package, or a user's own."""
    if ":" in name:
        return import_callable(name, what="model.name")
    if name not in MODELS:
        raise ValueError(
            f"model.name = {name!r}: unknown{did_you_mean(name, MODELS)} "
            "(write your own as package.module:name)"
        )
    module, _, function = MODELS[name].partition(":")
    factory: Factory = getattr(importlib.import_module(module), function)
    return factory


def _call(factory: Factory, name: str, *, sizes: dict[str, int]) -> nn.Module:
    what = f"model.name = {name!r}"
    net = call(factory, what=what, **_accepted(factory, sizes))
    if not isinstance(net, nn.Module):
        raise ValueError(
            f"{what}: the factory returned a {type(net).__name__}; it must return an nn.Module"
        )
    return net


def _accepted(factory: Factory, sizes: dict[str, int]) -> dict[str, int]:
    parameters = inspect.signature(factory).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return sizes
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = {parameter.name for parameter in parameters if parameter.kind in by_keyword}
    return {size: value for size, value in sizes.items() if size in names}
