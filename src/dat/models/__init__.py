"""Networks: those of the paper, small ones, and a user's own.

Each takes images in [0, 1] of any size and gives logits. To add one: a file here with a builder
`(classes, *, channels=3, width=None)`, and a line in `factory.MODELS`; the tests then cover it.
"""

from dat.models.factory import MODELS, build_model
from dat.models.folding import Folded, alike, fold
from dat.models.normalize import Normalize, normalized
from dat.models.transfer import (
    Block,
    Resized,
    blocks,
    find_head,
    freeze,
    head_classes,
    rate_factors,
    replace_head,
)

__all__ = [
    "MODELS",
    "Block",
    "Folded",
    "Normalize",
    "Resized",
    "alike",
    "blocks",
    "build_model",
    "find_head",
    "fold",
    "freeze",
    "head_classes",
    "normalized",
    "rate_factors",
    "replace_head",
]
