"""A model from a folder that `dat export` wrote, on any machine that has dat."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from dat.export.facts import FACTS, Facts
from dat.train import load_weights

WEIGHTS_FILE = "model.safetensors"


def load(folder: Path | str, *, network: str | None = None) -> nn.Module:
    """The model in `folder`, in eval mode: images in [0, 1] to logits.

    Nothing in the folder is executed and nothing is fetched: the network is one of ours, and its
    weights are safetensors. A network of somebody's own is code, so it is imported only where you
    name it yourself, as `network="package.module:name"`.
    """
    folder = Path(folder)
    facts = Facts.read(folder)
    name = str(facts.network["model"]["name"])
    if ":" in name and network is None:
        raise ValueError(
            f"{folder / FACTS}: the network is {name}, code of somebody's own; if you have it and "
            f"trust it: dat.load(..., network={name!r})"
        )
    model = facts.build(network)
    load_weights(model, folder / WEIGHTS_FILE)
    return facts.deployed(model).eval().requires_grad_(False)
