"""Checks of what an attack is called with: mistakes that would otherwise give wrong results without
an error. They are cheap, and run once per call; the shape of the loss is checked at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dat.core.lazy import torch
from dat.core.shapes import looks_channels_last
from dat.core.threat import ThreatModel

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = 1e-4
"""Rounding that pixels may exceed [0, 1] by."""


def check_call(attack: str, x: Tensor, threat: ThreatModel) -> None:
    """Raise unless `x` holds images in [0, 1] and `threat` is a threat model for them."""
    if not isinstance(threat, ThreatModel):
        raise ValueError(
            f"{attack}: the third argument is a {type(threat).__name__}, must be a "
            f"dat.ThreatModel; write dat.{attack}()(dat.AttackTarget(model, y), x, threat)"
        )
    check_images(attack, x, threat)


def check_images(attack: str, x: Tensor, threat: ThreatModel) -> None:
    """Raise unless `x` holds images in [0, 1] that the threat model is for."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{attack}: the images are a {type(x).__name__}: must be a tensor")
    if not x.is_floating_point():
        raise ValueError(
            f"{attack}: the images are {str(x.dtype).removeprefix('torch.')}: must be floats in "
            "[0, 1]; use images.float() / 255"
        )
    _check_channels(attack, x)
    _check_range(attack, x)
    threat.check_shape(x.shape[1:])


def _check_channels(attack: str, x: Tensor) -> None:
    """Refuse images whose last dimension is that of the channels."""
    if looks_channels_last(x.shape):
        raise ValueError(
            f"{attack}: the images have shape {tuple(x.shape)}, which looks like (n, height, "
            "width, channels): must be (n, channels, height, width); use x.permute(0, 3, 1, 2)"
        )


def _check_range(attack: str, x: Tensor) -> None:
    if x.numel() == 0:
        return
    low, high = map(float, x.detach().aminmax())
    if low >= -TOLERANCE and high <= 1 + TOLERANCE:
        return
    advice = (
        "divide them by 255"
        if low >= 0 and high <= 255
        else "normalize inside the model (dat.normalized), and attack the images themselves"
    )
    raise ValueError(
        f"{attack}: the images have pixels from {low:g} to {high:g}: must be in [0, 1]; {advice}"
    )


def check_labels(y: object, count: int) -> None:
    """Raise unless `y` holds a class per image."""
    if not isinstance(y, torch.Tensor):
        raise ValueError(f"the labels are a {type(y).__name__}: must be a tensor")
    if y.shape != (count,):
        raise ValueError(
            f"the labels have shape {tuple(y.shape)} for {count} images: must be one per image, "
            f"({count},)"
        )
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        dtype = str(y.dtype).removeprefix("torch.")
        raise ValueError(f"the labels are {dtype}: must be integers; use y.long()")


def check_classes(y: Tensor, classes: int) -> None:
    """Raise unless the model has all classes that are labels."""
    if int(y.min()) < 0 or int(y.max()) >= classes:
        raise ValueError(
            f"labels from {int(y.min())} to {int(y.max())}: the model has {classes} classes, "
            f"labels must be in 0..{classes - 1}"
        )


def check_losses(losses: object, count: int) -> None:
    """Raise unless a loss has returned one value per image."""
    if isinstance(losses, torch.Tensor) and losses.shape == (count,):
        return
    if not isinstance(losses, torch.Tensor):
        raise ValueError(f"the loss returns a {type(losses).__name__}: must be a tensor")
    shape = f"the loss returns shape {tuple(losses.shape)} for {count} images: must be one value "
    if losses.dim() == 2 and len(losses) == count and losses.shape[1] > 1:
        raise ValueError(
            f"{shape}per image, ({count},); if it is the model, write dat.AttackTarget(model, y)"
        )
    raise ValueError(f"{shape}per image, ({count},); use reduction='none'")
