"""Augmentation on the device, each sample by its own random stream.

It takes bytes as well as floats. Bytes are faster, a quarter of the memory being moved, and
converting the result to floats gives exactly what augmenting the converted images gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dat.data.randaugment import STRONGEST, rand_augment
from dat.fields import Settings, setting
from dat.native import crop
from dat.rng import Draws

AUGMENTATIONS = ("none", "crop", "crop-flip", "resized-crop")
PADDING = 4


@dataclass(frozen=True, kw_only=True)
class Augmentation(Settings):
    """Random changes to a batch of bytes or of floats in [0, 1]: first crop and flip, then
    RandAugment, then cutout, whose hole so stays a square of zeros."""

    kind: str = setting(
        "none",
        "crops after padding by 4 pixels, horizontal flips by a coin; resized-crop flips here, as "
        "its crops are made when pictures are decoded",
        choices=AUGMENTATIONS,
    )
    cutout: int = setting(0, "side of the square that is blacked out, in pixels; 0 is none", ge=0)
    randaugment: int = setting(0, "RandAugment: operations on each image; 0 is none", ge=0)
    magnitude: int = setting(9, "strength of RandAugment's operations", ge=0, le=STRONGEST)

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        if len(x) == 0:
            return x
        windows = self.windows(draws)
        if windows is not None:
            x = _flip(x, windows.flipped) if self.kind == "resized-crop" else windows.cut(x)
        if self.randaugment:
            x = rand_augment(x, draws, operations=self.randaugment, magnitude=self.magnitude)
        if self.cutout:
            luck = draws.fork("cutout").uniform(torch.Size((len(x), 2)))
            x = _cut_out(x, luck, self.cutout)
        return x

    def windows(self, draws: Draws) -> Windows | None:
        """Where images are cut out and which are mirrored; none where nothing is moved."""
        if self.kind == "none":
            return None
        luck = draws.uniform(torch.Size((len(draws.index), 3)))
        down, right = (luck[:, :2] * (2 * PADDING + 1)).long().unbind(1)
        flipped = luck[:, 2] >= 0.5
        return Windows(down, right, torch.zeros_like(flipped) if self.kind == "crop" else flipped)

    def beyond_moving(self) -> str | None:
        """A setting, as a user would write it, that does more to pixels than to move them."""
        if self.kind == "resized-crop":
            return "data.augmentation = resized-crop"
        if self.randaugment:
            return f"data.randaugment = {self.randaugment}"
        return f"data.cutout = {self.cutout}" if self.cutout else None


class Windows(NamedTuple):
    """Of each image padded with zeros the part that is cut out, as large as the image."""

    down: Tensor
    right: Tensor
    flipped: Tensor
    """Whether the part is mirrored."""

    def cut(self, x: Tensor) -> Tensor:
        found = crop(x, *self, PADDING)
        return _flip(_crop(x, self.down, self.right), self.flipped) if found is None else found

    def back(self) -> Windows:
        """The windows that put what was cut out in its place again, with zeros around it."""
        right = torch.where(self.flipped, self.right, 2 * PADDING - self.right)
        return Windows(2 * PADDING - self.down, right, self.flipped)

    def seen(self, height: int, width: int) -> Tensor:
        """Which pixels of the images are in their windows, as (n, 1, height, width)."""

        def within(size: int, first: Tensor) -> Tensor:
            place = torch.arange(size, device=first.device) + PADDING - first[:, None]
            return (place >= 0) & (place < size)

        rows, columns = within(height, self.down), within(width, self.right)
        return (rows[:, :, None] & columns[:, None, :]).unsqueeze(1)


def _crop(x: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """A window of the image's own size, anywhere in the image padded with zeros.

    All windows of the batch, also those across two images, are one view of the padded pixels. The n
    that are wanted are copied from it whole: eight times as fast as to index every pixel.
    """
    n, channels, height, width = x.shape
    padded = F.pad(x, (PADDING,) * 4).contiguous()
    image, plane, row, _ = padded.stride()
    last = (n - 1) * image + 2 * PADDING * (row + 1)
    windows = padded.as_strided((last + 1, channels, height, width), (1, plane, row, 1))
    start = torch.arange(n, device=x.device) * image + down * row + right
    return windows.index_select(0, start)


def _flip(x: Tensor, flipped: Tensor) -> Tensor:
    """Mirror some of the images: choosing among all and all mirrored is faster than `where`."""
    n = len(x)
    choice = torch.arange(n, device=x.device) + n * flipped
    return torch.cat((x, x.flip(3))).index_select(0, choice)


def _cut_out(x: Tensor, luck: Tensor, side: int) -> Tensor:
    """A black square with its centre anywhere in the image, so part of it may lie outside: DeVries
    and Taylor 2017, arXiv 1708.04552."""

    def within(size: int, luck: Tensor) -> Tensor:
        first = (luck * size).long() - side // 2
        place = torch.arange(size, device=x.device) - first[:, None]
        return (place >= 0) & (place < side)

    rows, columns = within(x.shape[2], luck[:, 0]), within(x.shape[3], luck[:, 1])
    hole = (rows[:, :, None] & columns[:, None, :]).unsqueeze(1)
    return x * ~hole  # several times as fast as filling a mask
