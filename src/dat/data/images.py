"""A set of labelled images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dat.data.stored import Images, Stored, chunks, join, read, take

TOLERANCE = 1e-6
MOST = 1_000_000
"""Classes."""
UNLABELLED = -1
"""The label of an image that has none."""


@dataclass(frozen=True)
class ImageData:
    """Images as (n, channels, height, width): bytes, or floats in [0, 1]. Labels are 0, 1, ..."""

    images: Images
    labels: Tensor
    classes: int
    names: tuple[str, ...] = ()
    """The classes' names, if they have any."""
    numbers: Tensor | None = None
    """The images' numbers in a larger set, ascending, if they are a part of one."""

    @classmethod
    def of(
        cls,
        images: Images,
        labels: Tensor,
        *,
        classes: int | None = None,
        names: Sequence[str] = (),
    ) -> ImageData:
        """Check and wrap; grey images may come without their channel dimension."""
        if isinstance(images, Tensor) and images.dim() == 3:
            images = images.unsqueeze(1)
        if len(images.shape) != 4 or images.shape.numel() == 0:
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
            classes = max(int(labels.max()) + 1, len(names), 1)
        if classes > MOST:
            raise ValueError(f"labels up to {classes - 1}: must be below {MOST}, counted from 0")
        wrong = ((labels < 0) | (labels >= classes)).nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise ValueError(
                f"label {int(labels[row])} of image {row}: must be from 0 to {classes - 1} "
                f"(wrong in all: {len(wrong)})"
            )
        return cls(_in_range(images), labels, classes, tuple(names))

    @classmethod
    def join(cls, pieces: Sequence[ImageData]) -> ImageData:
        """One after the other; their numbers must ascend."""
        numbers = [it.numbers for it in pieces if it.numbers is not None]
        return cls(
            join([it.images for it in pieces]),
            torch.cat([it.labels for it in pieces]),
            pieces[0].classes,
            pieces[0].names,
            torch.cat(numbers) if numbers else None,
        )

    def without_labels(self) -> ImageData:
        """The same images, as if nobody had labelled them."""
        return replace(self, labels=torch.full_like(self.labels, UNLABELLED))

    def labelled(self, labels: Tensor) -> ImageData:
        """The same images with other labels."""
        return replace(self, labels=ImageData.of(self.images, labels, classes=self.classes).labels)

    @property
    def has_labels(self) -> bool:
        return bool((self.labels != UNLABELLED).all())

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    @property
    def channels(self) -> int:
        return self.shape[0]

    def tensor(self) -> Tensor:
        """All images, in memory."""
        return (
            self.images if isinstance(self.images, Tensor) else self.images[torch.arange(len(self))]
        )

    def counts(self) -> Tensor:
        """How many images each class has."""
        return self.labels[self.labels != UNLABELLED].bincount(minlength=self.classes)

    def take(self, rows: Tensor) -> ImageData:
        """Some of the images, copied, or still where they are stored."""
        numbers = None if self.numbers is None else self.numbers[rows]
        images, labels = take(self.images, rows), self.labels[rows]
        return replace(self, images=images, labels=labels, numbers=numbers)

    def number(self, rows: Tensor) -> Tensor:
        """By which number an image draws its random values, wherever it is."""
        return rows if self.numbers is None else self.numbers[rows]

    def batch(self, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Images as floats in [0, 1] and labels, on the device."""
        images = read(self.images, rows).to(device, non_blocking=True)
        return as_floats(images), self.labels[rows].to(device, non_blocking=True)


def as_floats(images: Tensor) -> Tensor:
    """Bytes become floats in [0, 1]."""
    return images.float().div_(255) if images.dtype == torch.uint8 else images


def _in_range(images: Images) -> Images:
    """Bytes as they are; floats in [0, 1] within a rounding error, which is clipped away."""
    if images.dtype == torch.uint8:
        return images
    if not images.dtype.is_floating_point:
        raise ValueError(f"images are {images.dtype}: must be uint8, or floats in [0, 1]")
    first = 0
    for chunk in [images] if isinstance(images, Tensor) else chunks(images):
        _check_range(chunk, first)
        first += len(chunk)
    return images.clipped() if isinstance(images, Stored) else images.float().clamp(0.0, 1.0)


def _check_range(images: Tensor, first: int) -> None:
    flat = images.flatten(1)
    fine = (flat >= -TOLERANCE) & (flat <= 1 + TOLERANCE)  # NaN is in no range
    bad = (~fine.all(1)).nonzero()
    if len(bad):
        row = int(bad[0])
        low, high = flat[row].aminmax()
        raise ValueError(
            f"image {first + row} has pixels from {float(low):g} to {float(high):g}: must be in "
            f"[0, 1] (wrong in all: {len(bad)}); divide bytes by 255, and leave normalisation to "
            "the model"
        )
