"""Classification networks of torchvision, by `torchvision.models.get_model`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dat.core.imports import call, require
from dat.core.settings import did_you_mean
from dat.models.libraries import WeightsInfo, inner_name, refuse, what
from dat.models.transfer import Resized, find_head, head_classes, replace_head

RESERVED = {
    "num_classes": "is the number of classes of the data",
    **dict.fromkeys(("weights", "weights_backbone", "pretrained"), "set model.pretrained"),
}
CHANNELS = 3
"""torchvision's networks take color images."""


def build(
    name: str, *, classes: int, channels: int, pretrained: bool, args: Mapping[str, Any]
) -> nn.Module:
    """For grey images, which are repeated, the network is wrapped."""
    refuse(name, args, RESERVED)
    models = _models(name)
    if channels not in (1, CHANNELS):
        raise ValueError(
            f"{what(name)}: takes color or gray images, and these have {channels} channels"
        )
    # with weights, the number of classes is theirs
    options = {"weights": "DEFAULT"} if pretrained else {"num_classes": classes}
    net: nn.Module = call(
        models.get_model, what=what(name), name=inner_name(name), **options, **args
    )
    if head_classes(find_head(net)[1]) != classes:
        net = replace_head(net, classes, seed=torch.initial_seed() % 2**63)
    return net if channels == CHANNELS else Resized(net, channels=CHANNELS)


def weights_info(name: str, args: Mapping[str, Any]) -> WeightsInfo:
    models = _models(name)
    weights = call(models.get_model_weights, what=what(name), name=inner_name(name)).DEFAULT
    transforms = weights.transforms()
    mean, std = (tuple(map(float, values)) for values in (transforms.mean, transforms.std))
    size = transforms.crop_size
    return WeightsInfo(
        classes=len(weights.meta["categories"]),
        channels=len(mean),
        mean=mean,
        std=std,
        size=size[0] if isinstance(size, list) else size,
    )


def _models(name: str) -> Any:
    require("torchvision", "torchvision", what=what(name))
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:  # RuntimeError: operators that are missing
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{what(name)}: torchvision cannot be imported ({reason}); install the one that "
            "belongs to your torch"
        ) from None
    known = models.list_models(module=models)
    inner = inner_name(name)
    if inner not in known:
        near = did_you_mean(inner, known)
        raise ValueError(f"{what(name)}: torchvision has no such classification network{near}")
    return models
