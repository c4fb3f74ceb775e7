"""Calls a factory with those arguments that it accepts, under the names that it has for them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from dat.core.imports import call
from dat.core.lazy import torch

NAMES = {
    "classes": ("classes", "num_classes", "n_classes", "num_labels"),
    "channels": ("in_chans", "in_channels", "num_channels", "n_channels", "channels"),
    "width": ("width",),
}
"""What factories call the number of classes, of image channels, and the width; the name with fewest
other meanings first."""
CONVENTIONS: tuple[dict[str, str], ...] = (
    {"classes": "classes", "channels": "channels"},
    {"classes": "classes", "channels": "in_channels"},
    {"classes": "classes"},
    {"classes": "num_classes", "channels": "in_chans"},  # timm, where `channels` means the widths
    {"classes": "num_classes", "channels": "in_channels"},
    {"classes": "num_classes"},  # torchvision
    {"classes": "num_labels", "channels": "num_channels"},
    {},
)
"""What a factory with `**kwargs` is tried with, in this order."""
REFUSED = re.compile(r"unexpected keyword argument '(\w+)'")


def call_factory(
    factory: Callable[..., Any],
    *,
    what: str,
    sizes: Mapping[str, int],
    args: Mapping[str, Any],
    seed: int,
) -> Any:
    """Call `factory` with all of `args`, and those of `sizes` that it accepts.

    A factory with `**kwargs` does not say what it accepts: conventions are tried in turn until none
    of its names is refused. torch's generator is seeded before every call; `what` starts the error
    messages.
    """
    named, takes_any = _named(factory, sizes)
    for convention in CONVENTIONS if takes_any else ({},):
        names = {"width": "width"} if takes_any else {}
        tried = {size: name for size, name in (names | convention).items() if size in sizes}
        arguments = {name: sizes[size] for size, name in (tried | named).items()}
        # not torch.manual_seed, which would also reseed the GPUs; networks are built on the CPU
        torch.default_generator.manual_seed(seed)
        try:
            return call(factory, what=what, **{**arguments, **args})
        except ValueError as error:
            refused = REFUSED.search(str(error.__cause__))
            if refused is None or refused[1] not in convention.values():
                raise
    raise AssertionError("the last convention has no names")


def _named(factory: Callable[..., Any], sizes: Mapping[str, int]) -> tuple[dict[str, str], bool]:
    """The parameter of the factory for each size, as far as its signature has one; and whether it
    takes other keywords too."""
    parameters = inspect.signature(factory).parameters.values()
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    accepted = {parameter.name for parameter in parameters if parameter.kind in by_keyword}
    named = {
        size: next(name for name in NAMES[size] if name in accepted)
        for size in sizes
        if accepted.intersection(NAMES[size])
    }
    return named, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
