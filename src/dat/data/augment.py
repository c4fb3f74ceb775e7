"""Augmentation on the device, each sample by its own random stream."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dat.rng import Draws

AUGMENTATIONS = ("none", "crop", "crop-flip")
PADDING = 4


def augment(x: Tensor, kind: str, draws: Draws) -> Tensor:
    """Random crops after padding by 4 pixels and, for `crop-flip`, horizontal flips by a coin."""
    if kind == "none":
        return x
    if kind not in AUGMENTATIONS:
        raise ValueError(f"augmentation {kind!r}: must be one of {', '.join(AUGMENTATIONS)}")
    n, _, height, width = x.shape
    luck = draws.uniform(torch.Size((n, 3)))
    shift = (luck[:, :2] * (2 * PADDING + 1)).long()
    rows = shift[:, :1] + torch.arange(height, device=x.device)
    columns = shift[:, 1:] + torch.arange(width, device=x.device)
    if kind == "crop-flip":
        columns = torch.where(luck[:, 2:] < 0.5, columns, columns.flip(1))
    padded = F.pad(x, (PADDING,) * 4)
    sample = torch.arange(n, device=x.device)[:, None, None]
    # channels last while indexing: the three index tensors then broadcast to (n, height, width)
    cropped = padded.permute(0, 2, 3, 1)[sample, rows[:, :, None], columns[:, None, :]]
    return cropped.permute(0, 3, 1, 2).contiguous()
