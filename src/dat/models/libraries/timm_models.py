"""Networks of timm (PyTorch Image Models), by `timm.create_model`.

`timm/resnet18.a1_in1k` is a network of its registry, with the weights that its tag names;
`timm/hf-hub:ORG/NAME` and `timm/local-dir:FOLDER` have a `config.json` of timm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from dat.core.imports import call, require
from dat.core.settings import did_you_mean
from dat.models.libraries import WeightsInfo, inner_name, refuse, what

RESERVED = {
    "num_classes": "is the number of classes of the data",
    "in_chans": "is the number of channels of the images",
    "features_only": "would leave out the head",
    "pretrained": "set model.pretrained",
    **dict.fromkeys(("checkpoint_path", "pretrained_strict"), "set model.pretrained to a file"),
    **dict.fromkeys(
        ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "pretrained_model_args"),
        "cannot be set in a config",
    ),
}
HUB, FOLDER = "hf-hub:", "local-dir:"


def build(
    name: str, *, classes: int, channels: int, pretrained: bool, args: Mapping[str, Any]
) -> nn.Module:
    refuse(name, args, RESERVED)
    timm, inner = _library(name), inner_name(name)
    if not inner.startswith((HUB, FOLDER)) and not timm.is_model(inner.partition(".")[0]):
        known = did_you_mean(inner, timm.list_models()) if len(inner) > 2 else ""
        near = known if known.startswith(": did") else ": see timm.list_models()"
        raise ValueError(f"{what(name)}: timm has no such model{near}")
    net: nn.Module = call(
        timm.create_model,
        what=what(name),
        model_name=inner,
        pretrained=pretrained,
        num_classes=classes,
        in_chans=channels,
        **args,
    )
    return net


def weights_info(name: str, args: Mapping[str, Any]) -> WeightsInfo:
    timm, inner = _library(name), inner_name(name)
    config: Any
    if inner.startswith(HUB):
        load = timm.models.load_model_config_from_hf
        config = call(load, what=what(name), model_id=inner.removeprefix(HUB))[0]
    elif inner.startswith(FOLDER):  # timm exports no function that reads it by itself
        config = call(timm.create_model, what=what(name), model_name=inner).pretrained_cfg
    else:
        config = call(timm.get_pretrained_cfg, what=what(name), model_name=inner)
        config = {} if config is None else config.to_dict()
    if not {"mean", "std", "input_size", "num_classes"} <= config.keys():
        raise ValueError(f"{what(name)}: timm has no weights for it, or no mean and std of them")
    channels, _, width = config["input_size"]
    return WeightsInfo(
        classes=config["num_classes"],
        channels=channels,
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        size=width,
    )


def _library(name: str) -> Any:
    require("timm", "timm", what=what(name))
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # RuntimeError: operators that torchvision lacks
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{what(name)}: timm cannot be imported ({reason}); install the torchvision that "
            "belongs to your torch"
        ) from None
    return timm
