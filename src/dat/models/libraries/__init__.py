"""Networks of other libraries by name: `timm/NAME`, `torchvision/NAME`, `hf/NAME`.

Only the library's own factory function is called, with a name and plain values, so such a name may
come from a foreign run's config: no code that a model hub has is executed, and weights are read
without unpickling code.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn

LIBRARIES = {
    "timm": "dat.models.libraries.timm_models",
    "torchvision": "dat.models.libraries.torchvision_models",
    "hf": "dat.models.libraries.hf_models",
}


@dataclass(frozen=True, kw_only=True)
class WeightsInfo:
    """What pre-trained weights expect of their images, and their classes."""

    classes: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int | None
    """The image size that they were trained on, if known."""


class Library(Protocol):
    """A module of this package."""

    def build(
        self,
        name: str,
        *,
        classes: int,
        channels: int,
        pretrained: bool,
        args: Mapping[str, Any],
    ) -> nn.Module:
        """The network, without normalization; a head for other classes than those of the
        pre-trained weights is new. Its weights are drawn from torch's generator."""
        ...

    def weights_info(self, name: str, args: Mapping[str, Any]) -> WeightsInfo:
        """What the weights that the library has for this name expect."""
        ...


def is_library(name: str) -> bool:
    """Whether a network's name is that of a library's network."""
    library, slash, inner = name.partition("/")
    return library in LIBRARIES and bool(slash and inner)


def reads_hub(name: str) -> bool:
    """Whether building the network reads a description from a model hub, or from a folder."""
    return name.startswith(("hf/", "timm/hf-hub:", "timm/local-dir:"))


def library_of(name: str) -> Library:
    """The library of a network."""
    library: Any = importlib.import_module(LIBRARIES[name.partition("/")[0]])
    return library  # type: ignore[no-any-return]


def weights_info(name: str, args: Mapping[str, Any]) -> WeightsInfo:
    """What the weights that a library has for this network expect of their images."""
    return library_of(name).weights_info(name, args)


def inner_name(name: str) -> str:
    """The name of the network in its library."""
    return name.partition("/")[2]


def what(name: str) -> str:
    """The beginning of error messages."""
    return f"model.name = {name!r}"


def refuse(name: str, args: Mapping[str, Any], reserved: Mapping[str, str]) -> None:
    """Refuse arguments that other settings determine, or that may not come from a config."""
    for key in args.keys() & reserved.keys():
        raise ValueError(f"model.args.{key}: {reserved[key]}")
