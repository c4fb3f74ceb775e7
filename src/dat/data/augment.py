"""Augmentation on the device, with one random stream per sample.

Works on uint8 and on floats. uint8 is faster, as it moves a quarter of the memory, and converting
its result to floats gives exactly what augmenting the converted images gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dat.core.lazy import functional as F
from dat.core.lazy import torch
from dat.core.rng import Streams
from dat.core.settings import Settings, setting
from dat.core.short_repr import short_repr
from dat.data.erasing import erase
from dat.data.jitter import jitter
from dat.data.randaugment import STRONGEST, rand_augment
from dat.kernels.native import crop

if TYPE_CHECKING:
    from torch import Tensor

AUGMENTATIONS = ("none", "crop", "crop-flip", "resized-crop")
PIXEL_VALUES = ("randaugment", "cutout", "jitter", "erasing")
"""Settings of augmentations that change pixel values."""
PADDING = 4


@dataclass(frozen=True, kw_only=True)
class Augmentation(Settings):
    """Random augmentation of a batch of uint8 images or of floats in [0, 1].

    Crop and flip come first, then jitter, RandAugment, cutout and erasing, so that holes stay as
    they are.
    """

    kind: str = setting(
        "none",
        "random crops after padding by 4 pixels, random horizontal flips; resized-crop crops when "
        "pictures are decoded",
        choices=AUGMENTATIONS,
    )
    cutout: int = setting(0, "side of the square set to zero, in pixels; 0 disables it", ge=0)
    randaugment: int = setting(0, "RandAugment: operations per image; 0 disables it", ge=0)
    magnitude: int = setting(9, "strength of RandAugment's operations", ge=0, le=STRONGEST)
    jitter: float = setting(
        0.0,
        "color jitter: largest change of brightness, contrast and saturation; 0 disables it",
        ge=0,
        le=1,
    )
    erasing: float = setting(
        0.0, "random erasing: share of images with an erased box; 0 disables it", ge=0, le=1
    )

    def __call__(self, x: Tensor, draws: Streams) -> Tensor:
        if len(x) == 0:
            return x
        windows = self.windows(draws)
        if windows is not None:
            x = _flip(x, windows.flipped) if self.kind == "resized-crop" else windows.apply(x)
        if self.jitter:
            x = jitter(x, draws.fork("jitter"), self.jitter)
        if self.randaugment:
            x = rand_augment(x, draws, operations=self.randaugment, magnitude=self.magnitude)
        if self.cutout:
            centers = draws.fork("cutout").uniform(torch.Size((len(x), 2)))
            x = _cutout(x, centers, self.cutout)
        if self.erasing:
            x = erase(x, draws.fork("erasing"), self.erasing)
        return x

    def windows(self, draws: Streams) -> CropWindows | None:
        """Which crop of each image is taken and which are flipped; None without crops."""
        if self.kind == "none":
            return None
        uniform = draws.uniform(torch.Size((len(draws.index), 3)))
        down, right = (uniform[:, :2] * (2 * PADDING + 1)).long().unbind(1)
        flipped = uniform[:, 2] >= 0.5
        return CropWindows(
            down, right, torch.zeros_like(flipped) if self.kind == "crop" else flipped
        )

    def pixel_value_setting(self) -> str | None:
        """The setting, as a user writes it, that changes pixel values rather than moving them."""
        if self.kind == "resized-crop":
            return "data.augmentation = resized-crop"
        values = {name: getattr(self, name) for name in PIXEL_VALUES}
        return next((f"data.{name} = {value:g}" for name, value in values.items() if value), None)


class CropWindows(NamedTuple):
    """Per image, the offset of a crop of the image's own size in the zero-padded image."""

    down: Tensor
    right: Tensor
    flipped: Tensor
    """Whether the crop is flipped horizontally."""

    def __repr__(self) -> str:
        return short_repr(self)

    def apply(self, x: Tensor) -> Tensor:
        """Crop and flip, by the native kernel where it applies."""
        cropped = crop(x, *self, PADDING)
        return _flip(_crop(x, self.down, self.right), self.flipped) if cropped is None else cropped

    def inverse(self) -> CropWindows:
        """The windows that undo these: they move a crop back, with zeros around it."""
        right = torch.where(self.flipped, self.right, 2 * PADDING - self.right)
        return CropWindows(2 * PADDING - self.down, right, self.flipped)

    def visible_mask(self, height: int, width: int) -> Tensor:
        """Mask of the image pixels inside their windows, as (n, 1, height, width)."""

        def within(size: int, first: Tensor) -> Tensor:
            position = torch.arange(size, device=first.device) + PADDING - first[:, None]
            return (position >= 0) & (position < size)

        rows, columns = within(height, self.down), within(width, self.right)
        return (rows[:, :, None] & columns[:, None, :]).unsqueeze(1)


def _crop(x: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """A crop of the image's own size from the zero-padded image.

    All possible windows of the batch, even those across two images, form one strided view of the
    padded pixels. Copying the n wanted ones from it is eight times as fast as indexing pixels.
    """
    n, channels, height, width = x.shape
    padded = F.pad(x, (PADDING,) * 4).contiguous()
    image, plane, row, _ = padded.stride()
    last = (n - 1) * image + 2 * PADDING * (row + 1)
    windows = padded.as_strided((last + 1, channels, height, width), (1, plane, row, 1))
    start = torch.arange(n, device=x.device) * image + down * row + right
    return windows.index_select(0, start)


def _flip(x: Tensor, flipped: Tensor) -> Tensor:
    """Flip the selected images; selecting from originals and flips is faster than `where`."""
    n = len(x)
    choice = torch.arange(n, device=x.device) + n * flipped
    return torch.cat((x, x.flip(3))).index_select(0, choice)


def _cutout(x: Tensor, centers: Tensor, side: int) -> Tensor:
    """Zero a square centred anywhere in the image; it may extend past the border (DeVries and
    Taylor 2017, arXiv 1708.04552)."""

    def within(size: int, center: Tensor) -> Tensor:
        first = (center * size).long() - side // 2
        position = torch.arange(size, device=x.device) - first[:, None]
        return (position >= 0) & (position < side)

    rows, columns = within(x.shape[2], centers[:, 0]), within(x.shape[3], centers[:, 1])
    hole = (rows[:, :, None] & columns[:, None, :]).unsqueeze(1)
    return x * ~hole  # several times as fast as masked_fill
