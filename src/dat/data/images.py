"""A dataset of labelled images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dat.core.shapes import looks_channels_last
from dat.core.short_repr import short_repr
from dat.data.lazy_images import Images, LazyImages, chunks, join, read, take

TOLERANCE = 1e-6
MAX_CLASSES = 1_000_000
UNLABELLED = -1
"""The label of an unlabelled image."""


@dataclass(frozen=True)
class ImageData:
    """Images (n, channels, height, width), uint8 or floats in [0, 1], with labels 0, 1, ..."""

    images: Images
    labels: Tensor
    classes: int
    names: tuple[str, ...] = ()
    """The class names, if known."""
    numbers: Tensor | None = None
    """For a subset: the images' indices in the full dataset, ascending."""

    __repr__ = short_repr

    @classmethod
    def of(
        cls,
        images: Images,
        labels: Tensor,
        *,
        classes: int | None = None,
        names: Sequence[str] = (),
    ) -> ImageData:
        """Validate images and labels; greyscale images may lack the channel dimension."""
        if isinstance(images, Tensor) and images.dim() == 3:
            images = images.unsqueeze(1)
        if len(images.shape) != 4 or images.shape.numel() == 0:
            raise ValueError(
                f"images have shape {tuple(images.shape)}: must be (n, channels, height, width)"
            )
        if looks_channels_last(images.shape):
            raise ValueError(
                f"images have shape {tuple(images.shape)}, which looks like (n, height, width, "
                "channels): must be (n, channels, height, width); use x.permute(0, 3, 1, 2)"
            )
        if labels.shape != (len(images),):
            raise ValueError(
                f"labels have shape {tuple(labels.shape)}: must be one per image, ({len(images)},)"
            )
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise ValueError(f"labels are {labels.dtype}: must be integers")
        labels = labels.to(torch.int64)
        if classes is None:
            classes = max(int(labels.max()) + 1, len(names), 1)
        if classes > MAX_CLASSES:
            raise ValueError(f"labels up to {classes - 1}: must be from 0 to {MAX_CLASSES - 1}")
        invalid = ((labels < 0) | (labels >= classes)).nonzero()
        if len(invalid):
            row = int(invalid[0])
            raise ValueError(
                f"label {int(labels[row])} of image {row}: must be from 0 to {classes - 1} "
                f"({len(invalid)} invalid in total)"
            )
        return cls(_in_range(images), labels, classes, tuple(names))

    @classmethod
    def join(cls, pieces: Sequence[ImageData]) -> ImageData:
        """Concatenate datasets; their `numbers` must ascend."""
        numbers = [piece.numbers for piece in pieces if piece.numbers is not None]
        return cls(
            join([piece.images for piece in pieces]),
            torch.cat([piece.labels for piece in pieces]),
            pieces[0].classes,
            pieces[0].names,
            torch.cat(numbers) if numbers else None,
        )

    def without_labels(self) -> ImageData:
        """The same images without their labels."""
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
        """Number of images per class."""
        return self.labels[self.labels != UNLABELLED].bincount(minlength=self.classes)

    def take(self, rows: Tensor) -> ImageData:
        """The given rows: copied from memory, or still lazy."""
        numbers = None if self.numbers is None else self.numbers[rows]
        images, labels = take(self.images, rows), self.labels[rows]
        return replace(self, images=images, labels=labels, numbers=numbers)

    def number(self, rows: Tensor) -> Tensor:
        """The indices in the full dataset, which select the images' random streams."""
        return rows if self.numbers is None else self.numbers[rows]

    def batch(self, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Images as floats in [0, 1], and labels, on the device."""
        images = read(self.images, rows).to(device, non_blocking=True)
        return as_floats(images), self.labels[rows].to(device, non_blocking=True)


def as_floats(images: Tensor) -> Tensor:
    """Convert uint8 to floats in [0, 1]; floats are returned unchanged."""
    return images.float().div_(255) if images.dtype == torch.uint8 else images


def _in_range(images: Images) -> Images:
    """uint8 unchanged; floats clipped to [0, 1], which they may exceed by a rounding error only."""
    if images.dtype == torch.uint8:
        return images
    if not images.dtype.is_floating_point:
        raise ValueError(f"images are {images.dtype}: must be uint8, or floats in [0, 1]")
    if isinstance(images, LazyImages) and images.slow:  # checked whenever an image is read
        return images.clipped()
    first = 0
    for chunk in [images] if isinstance(images, Tensor) else chunks(images):
        check_range(chunk, first)
        first += len(chunk)
    return images.clipped() if isinstance(images, LazyImages) else images.float().clamp(0.0, 1.0)


def check_range(images: Tensor, first: int) -> None:
    """Raise if a pixel is outside of [0, 1] by more than rounding; `first` numbers the images."""
    flat = images.flatten(1)
    valid = (flat >= -TOLERANCE) & (flat <= 1 + TOLERANCE)  # False for NaN
    invalid = (~valid.all(1)).nonzero()
    if len(invalid):
        row = int(invalid[0])
        low, high = flat[row].aminmax()
        raise ValueError(
            f"image {first + row} has pixels from {float(low):g} to {float(high):g}: must be in "
            f"[0, 1] ({len(invalid)} invalid in total); divide uint8 by 255, and leave "
            "normalization to the model"
        )
