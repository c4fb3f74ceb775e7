"""Data: images in memory, where they come from, and which worker draws which of them."""

from dat.data.augment import AUGMENTATIONS, augment
from dat.data.images import UNLABELLED, ImageData
from dat.data.parts import Plan, default_parts, split_holdout, split_labels
from dat.data.pseudo import PseudoLabels
from dat.data.sources import SOURCES, Splits, load
from dat.data.supply import Mix, Source, Supply, supply
from dat.data.unlabelled import load_unlabelled

__all__ = [
    "AUGMENTATIONS",
    "SOURCES",
    "UNLABELLED",
    "ImageData",
    "Mix",
    "Plan",
    "PseudoLabels",
    "Source",
    "Splits",
    "Supply",
    "augment",
    "default_parts",
    "load",
    "load_unlabelled",
    "split_holdout",
    "split_labels",
    "supply",
]
