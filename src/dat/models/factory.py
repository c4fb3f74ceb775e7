"""A network by its name: one of ours, of a library, or the user's own as `package.module:factory`.

`wrn-34-10` and its like belong to a family; `timm/...`, `torchvision/...` and `hf/...` to a library
(dat.models.libraries).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from dat.core.imports import import_callable
from dat.core.lazy import nn, torch
from dat.core.rng import derive
from dat.core.settings import did_you_mean
from dat.models.libraries import LIBRARIES, is_library, library_of
from dat.models.signatures import call_factory

Factory = Callable[..., "nn.Module"]

MODELS = {
    "cnn": "dat.models.cnn:small_cnn",
    "mnist-cnn": "dat.models.cnn:mnist_cnn",
    "preact-resnet18": "dat.models.preact_resnet:preact_resnet18",
    "preact-resnet34": "dat.models.preact_resnet:preact_resnet34",
    "preact-resnet50": "dat.models.preact_resnet:preact_resnet50",
    "resnet18": "dat.models.resnet:resnet18",
    "resnet34": "dat.models.resnet:resnet34",
    "resnet50": "dat.models.resnet:resnet50",
    "wrn-28-10": "dat.models.wide_resnet:wrn_28_10",
    "convnext-tiny": "dat.models.convnext:convnext_tiny",
    "convnext-tiny-convstem": "dat.models.convnext:convnext_tiny_convstem",
    "vit-4": "dat.models.vit:vit_4",
    "vit-16": "dat.models.vit:vit_16",
    "vit-16-convstem": "dat.models.vit:vit_16_convstem",
}
"""The networks of this package, imported on first use."""
FAMILIES = {
    r"wrn-(\d+)-(\d+)": "dat.models.wide_resnet:wide_resnet",
    r"convnext-(atto|femto|pico|nano|small|base)(-convstem)?": "dat.models.convnext:convnext",
}
"""Names with parameters: from the match, a function makes the factory."""
ACTIVATIONS = ("relu", "silu", "gelu")
NAME_PATTERNS = (
    ("wrn-DEPTH-WIDTH", r"wrn-\d+-\d+"),
    ("convnext-SIZE[-convstem] (atto, femto, pico, nano, small, base)", [*FAMILIES][1]),
    *((f"{library}/NAME", rf"{library}/.+") for library in LIBRARIES),
)
"""The forms of names that are not in MODELS, as shown to users, and as regular expressions."""


def build_model(
    name: str,
    classes: int,
    *,
    channels: int = 3,
    width: int | None = None,
    seed: int = 0,
    activation: str | None = None,
    args: Mapping[str, Any] | None = None,
    pretrained: bool = False,
) -> nn.Module:
    """Build the network called `name`; its initial weights depend on `seed` alone.

    A factory receives those of classes, channels and width that it accepts, under the names that it
    has for them (num_classes, in_chans, ...); what is None is left to its defaults. It must accept
    `activation` and `args`. `pretrained` loads the weights that a library has for the name.
    """
    sizes = {"classes": classes, "channels": channels, "width": width}
    given = {size: value for size, value in sizes.items() if value is not None}
    for size, value in given.items():
        if value < 1:
            raise ValueError(f"{size} = {value}: must be at least 1")
    values = dict(args or {}) | ({} if activation is None else {"activation": activation})
    what, key = f"model.name = {name!r}", derive(seed, "weights")
    with torch.random.fork_rng(devices=[]):
        if is_library(name):
            if width is not None:
                raise ValueError(f"model.width = {width}: {name} has no width; use model.args")
            torch.default_generator.manual_seed(key)
            net = library_of(name).build(
                name, classes=classes, channels=channels, pretrained=pretrained, args=values
            )
        elif pretrained:
            raise ValueError(f"{what}: comes without weights; pretrained must be false")
        else:
            factory = find_factory(name)
            net = call_factory(factory, what=what, sizes=given, args=values, seed=key)
    if not isinstance(net, nn.Module):
        raise ValueError(
            f"{what}: the factory returned a {type(net).__name__}; it must return an nn.Module"
        )
    return net


def find_factory(name: str) -> Factory:
    """The factory of a network of this package, or a user's own."""
    if ":" in name:
        return import_callable(name, what="model.name")
    if name in MODELS:
        return _imported(MODELS[name])
    for family, path in FAMILIES.items():
        if match := re.fullmatch(family, name):
            made: Factory = _imported(path)(match)
            return made
    raise ValueError(
        f"model.name = {name!r}: unknown{did_you_mean(name, MODELS)} "
        "(write your own as package.module:name)"
    )


def _imported(path: str) -> Factory:
    module, _, function = path.partition(":")
    factory: Factory = getattr(importlib.import_module(module), function)
    return factory
