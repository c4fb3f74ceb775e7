"""Data: images in memory, where they come from, and which worker draws which of them."""

from dat.data.augment import AUGMENTATIONS, augment
from dat.data.images import ImageData
from dat.data.parts import Plan, default_parts, split_holdout
from dat.data.sources import SOURCES, Splits, load

__all__ = [
    "AUGMENTATIONS",
    "SOURCES",
    "ImageData",
    "Plan",
    "Splits",
    "augment",
    "default_parts",
    "load",
    "split_holdout",
]
