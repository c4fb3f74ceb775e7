"""A set of labelled images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = 1e-6
UNLABELLED = -1
"""The label of an image that has none."""


@dataclass(frozen=True)
class ImageData:
    """Images as (n, channels, height, width): bytes, or floats in [0, 1]. Labels are 0, 1, ..."""

    images: Tensor
    labels: Tensor
    classes: int

    @classmethod
    def of(cls, images: Tensor, labels: Tensor, *, classes: int | None = None) -> ImageData:
        """Check and wrap; grey images may come without their channel dimension."""
        if images.dim() == 3:
            images = images.unsqueeze(1)
        if images.dim() != 4 or images.numel() == 0:
            raise ValueError(
                f"images have shape {tuple(images.shape)}: must be (n, channels, height, width)"
            )
        if labels.shape != (len(images),):
            raise ValueError(
                f"labels have shape {tuple(labels.shape)}: must be one for each of the "
                f"{len(images)} images"
            )
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise ValueError(f"labels are {labels.dtype}: must be whole numbers")
        labels = labels.to(torch.int64)
        if classes is None:
            classes = max(int(labels.max()) + 1, 1)
        wrong = ((labels < 0) | (labels >= classes)).nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise ValueError(
                f"label {int(labels[row])} of image {row}: must be from 0 to {classes - 1} "
                f"(wrong in all: {len(wrong)})"
            )
        return cls(_in_range(images), labels, classes)

    def without_labels(self) -> ImageData:
        """The same images, as if nobody had labelled them."""
        return ImageData(self.images, torch.full_like(self.labels, UNLABELLED), self.classes)

    def labelled(self, labels: Tensor) -> ImageData:
        """The same images with other labels."""
        return ImageData.of(self.images, labels, classes=self.classes)

    @property
    def has_labels(self) -> bool:
        return bool((self.labels != UNLABELLED).all())

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def channels(self) -> int:
        return self.images.shape[1]

    def take(self, rows: Tensor) -> ImageData:
        """Some of the images, copied."""
        return ImageData(self.images[rows], self.labels[rows], self.classes)

    def batch(self, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Images as floats in [0, 1] and labels, on the device."""
        images = self.images[rows].to(device, non_blocking=True)
        if images.dtype == torch.uint8:
            images = images.float().div_(255)
        return images, self.labels[rows].to(device, non_blocking=True)


def _in_range(images: Tensor) -> Tensor:
    """Bytes as they are; floats in [0, 1] within a rounding error, which is clipped away."""
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point():
        raise ValueError(f"images are {images.dtype}: must be uint8, or floats in [0, 1]")
    flat = images.flatten(1)
    fine = (flat >= -TOLERANCE) & (flat <= 1 + TOLERANCE)  # NaN is in no range
    bad = (~fine.all(1)).nonzero()
    if len(bad):
        row = int(bad[0])
        low, high = flat[row].aminmax()
        raise ValueError(
            f"image {row} has pixels from {float(low):g} to {float(high):g}: must be in "
            f"[0, 1] (wrong in all: {len(bad)}); divide bytes by 255, and leave normalisation to "
            "the model"
        )
    return images.float().clamp(0.0, 1.0)
