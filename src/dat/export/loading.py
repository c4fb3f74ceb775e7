"""Load a model from a folder written by `dat export`."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from dat.export.description import DESCRIPTION, ModelDescription
from dat.models import is_library, reads_hub
from dat.train import load_weights

WEIGHTS_FILE = "model.safetensors"


def load(folder: Path | str, *, network: str | None = None) -> nn.Module:
    """The model in `folder`, in eval mode; it maps images in [0, 1] to logits.

    Nothing in the folder is executed and nothing is downloaded: the network is built in, and its
    weights are safetensors. A custom network is code, so it is imported only if you name it
    yourself, as `network="package.module:name"`; so is a network whose description is on a model
    hub (`hf/ORG/NAME`).
    """
    folder = Path(folder)
    description = ModelDescription.read(folder)
    name = str(description.network["model"]["name"])
    if ":" in name and not is_library(name) and network is None:
        raise ValueError(
            f"{folder / DESCRIPTION}: the network is {name}, custom code; if you have it and trust "
            f"it: dat.load(..., network={name!r})"
        )
    if reads_hub(name) and network is None:
        raise ValueError(
            f"{folder / DESCRIPTION}: the network is {name}, whose description is on a model hub "
            f"or in a folder; if you trust it: dat.load(..., network={name!r})"
        )
    model = description.build(network)
    load_weights(model, folder / WEIGHTS_FILE)
    return description.deployed(model).eval().requires_grad_(False)
