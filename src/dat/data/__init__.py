"""Data: where images come from and are kept, and which worker draws which of them."""

from dat.data.augment import AUGMENTATIONS, Augmentation, Windows
from dat.data.folder import Reading
from dat.data.images import UNLABELLED, ImageData, as_floats
from dat.data.local import WEIGH_BY, Parts, Rounds
from dat.data.parts import Plan, Split, default_parts, some_images, split_holdout, split_labels
from dat.data.pseudo import PseudoLabels
from dat.data.sources import SOURCES, Splits, is_known, load
from dat.data.stored import Stored, chunks
from dat.data.supply import Dealing, Drawn, Mix, Source, Supply, supply
from dat.data.unlabelled import load_unlabelled

__all__ = [
    "AUGMENTATIONS",
    "SOURCES",
    "UNLABELLED",
    "WEIGH_BY",
    "Augmentation",
    "Dealing",
    "Drawn",
    "ImageData",
    "Mix",
    "Parts",
    "Plan",
    "PseudoLabels",
    "Reading",
    "Rounds",
    "Source",
    "Split",
    "Splits",
    "Stored",
    "Supply",
    "Windows",
    "as_floats",
    "chunks",
    "default_parts",
    "is_known",
    "load",
    "load_unlabelled",
    "some_images",
    "split_holdout",
    "split_labels",
    "supply",
]
