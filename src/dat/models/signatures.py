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
    "channels": ("channels", "in_chans", "in_channels", "num_channels", "n_channels"),
    "width": ("width",),
}
"""What factories call the number of classes, of image channels, and the width."""
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

    A factory with `**kwargs` does not say what it accepts: each name is tried in turn until none is
    refused. torch's generator is seeded before every call; `what` starts the error messages.
    """
    named, untried = _named(factory, sizes)
    while True:
        tried = {size: names[0] for size, names in untried.items() if names}
        arguments = {name: sizes[size] for size, name in (named | tried).items()}
        # not torch.manual_seed, which would also reseed the GPUs; networks are built on the CPU
        torch.default_generator.manual_seed(seed)
        try:
            return call(factory, what=what, **{**arguments, **args})
        except ValueError as error:
            refused = REFUSED.search(str(error.__cause__))
            size = next((s for s, name in tried.items() if refused and name == refused[1]), None)
            if size is None:
                raise
            untried[size] = untried[size][1:]


def _named(
    factory: Callable[..., Any], sizes: Mapping[str, int]
) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """The parameter of the factory for each size, if its signature has one; and the names to try
    for the other sizes, if it takes any keyword."""
    parameters = inspect.signature(factory).parameters.values()
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    accepted = {parameter.name for parameter in parameters if parameter.kind in by_keyword}
    named = {
        size: next(name for name in NAMES[size] if name in accepted)
        for size in sizes
        if accepted.intersection(NAMES[size])
    }
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    rest = [size for size in sizes if size not in named] if takes_any else []
    return named, {size: NAMES[size] for size in rest}
