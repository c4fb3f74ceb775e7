"""Image classifiers of Hugging Face transformers, by `AutoModelForImageClassification`.

`hf/ORG/NAME` is a repository of the hub, `hf/FOLDER` a folder written by `save_pretrained`, and
`hf/resnet` a kind of network, whose sizes are `model.args`. Code in a repository is not executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from dat.core.imports import call, require
from dat.models.libraries import WeightsInfo, inner_name, refuse, what

ATTENTION = ("eager", "sdpa")
"""Other implementations may be code from a hub."""
RESERVED = {
    **dict.fromkeys(("num_labels", "id2label", "label2id"), "is the number of classes of the data"),
    "num_channels": "is the number of channels of the images",
    **dict.fromkeys(
        (
            *("auto_map", "architectures", "model_type", "attn_implementation", "dtype"),
            *("quantization_config", "trust_remote_code", "torch_dtype", "transformers_version"),
        ),
        "cannot be set in a config",
    ),
}


class Logits(nn.Module):
    """A network whose output is a ModelOutput, reduced to its logits."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.net(pixel_values=x, return_dict=True).logits)


def build(
    name: str, *, classes: int, channels: int, pretrained: bool, args: Mapping[str, Any]
) -> nn.Module:
    config = _config(name, args)
    transformers = _library(name)
    if config.num_labels != classes:
        config.num_labels = classes
    if hasattr(config, "num_channels"):
        config.num_channels = channels
    auto = transformers.AutoModelForImageClassification
    if not pretrained:
        options = {"trust_remote_code": False, "dtype": torch.float32}
        return Logits(call(auto.from_config, what=what(name), config=config, **options).train())
    net, report = call(
        auto.from_pretrained,
        what=what(name),
        pretrained_model_name_or_path=inner_name(name),
        config=config,
        trust_remote_code=False,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,  # of the head only, as checked below
        output_loading_info=True,
    )
    mismatched = (key if isinstance(key, str) else key[0] for key in report["mismatched_keys"])
    new = sorted({*report["missing_keys"], *mismatched})
    body = [key for key in new if "classifier" not in key and not key.startswith("head")]
    if body:
        raise ValueError(f"{what(name)}: the weights have no {body[0]} of this shape")
    return Logits(net.train())


def weights_info(name: str, args: Mapping[str, Any]) -> WeightsInfo:
    config = _config(name, args)
    from transformers.image_processing_base import ImageProcessingMixin

    values, _ = call(
        ImageProcessingMixin.get_image_processor_dict,
        what=f"{what(name)}: no description of its images; set model.mean and model.std",
        pretrained_model_name_or_path=inner_name(name),
    )
    if values.get("do_flip_channel_order"):
        raise ValueError(f"{what(name)}: expects channels in the order blue, green, red")
    if values.get("rescale_offset"):
        raise ValueError(f"{what(name)}: images with rescale_offset are not supported")
    channels = getattr(config, "num_channels", 3)
    mean, std = [0.0] * channels, [1.0] * channels
    if values.get("do_normalize", True):
        if "image_mean" not in values or "image_std" not in values:
            raise ValueError(f"{what(name)}: no image_mean; set model.mean and model.std")
        mean, std = values["image_mean"], values["image_std"]
    # pixels in [0, 255] times this factor is what is normalized, and ours are in [0, 1]
    scale = 255 * values.get("rescale_factor", 1 / 255) if values.get("do_rescale", True) else 255
    return WeightsInfo(
        classes=config.num_labels,
        channels=len(mean),
        mean=tuple(value / scale for value in mean),
        std=tuple(value / scale for value in std),
        size=_size(values),
    )


def _size(values: Mapping[str, Any]) -> int | None:
    """The height of the images that an image processor makes."""
    key = "crop_size" if values.get("do_center_crop") else "size"
    size = values.get(key)
    if isinstance(size, Mapping):
        size = size.get("height", size.get("shortest_edge"))
    return size if isinstance(size, int) else None


def _config(name: str, args: Mapping[str, Any]) -> Any:
    """The network's configuration, with `args`, each of which it must have."""
    refuse(name, args, RESERVED)
    transformers, inner = _library(name), inner_name(name)
    auto = transformers.AutoConfig
    if not Path(inner).is_dir() and inner in transformers.CONFIG_MAPPING:
        config = call(auto.for_model, what=what(name), model_type=inner)
    else:
        options = {"pretrained_model_name_or_path": inner, "trust_remote_code": False}
        config = call(auto.from_pretrained, what=what(name), **options)
    unknown = [key for key in args if key.startswith("_") or not hasattr(config, key)]
    if unknown:
        raise ValueError(f"model.args.{unknown[0]}: {type(config).__name__} has no such value")
    if args:
        values = {**config.to_dict(), **args} if Path(inner).is_dir() or "/" in inner else args
        config = call(type(config).from_dict, what=what(name), config_dict=dict(values))
    if getattr(config, "_attn_implementation", None) not in (None, *ATTENTION):
        raise ValueError(f"{what(name)}: only the attention implementations {ATTENTION} are used")
    return config


def _library(name: str) -> Any:
    require("transformers", "hf", what=what(name))
    import transformers

    return transformers
