"""Networks: those of the paper, small ones, and users' own.

Each maps images in [0, 1] of any size to logits. To add one: a file here with a factory
`(classes, *, channels=3, width=None)`, and a line in `factory.MODELS`; the tests then cover it.
`libraries` builds those of timm, torchvision and Hugging Face transformers.
"""

from typing import TYPE_CHECKING

from dat.core.lazy import lazy_names
from dat.models.factory import ACTIVATIONS, MODELS, NAME_PATTERNS, build_model
from dat.models.libraries import WeightsInfo, is_library, reads_hub, weights_info

if TYPE_CHECKING:
    from dat.core.adapter import Adapted, Adapter, adapted, computes_in_half, lies_contiguous
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
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        folding="Folded alike fold",
        normalize="Normalize normalized",
        transfer="Block Resized blocks find_head freeze head_classes rate_factors replace_head",
        **{".core.adapter": "Adapted Adapter adapted computes_in_half lies_contiguous"},
    )

__all__ = [
    "ACTIVATIONS",
    "MODELS",
    "NAME_PATTERNS",
    "Adapted",
    "Adapter",
    "Block",
    "Folded",
    "Normalize",
    "Resized",
    "WeightsInfo",
    "adapted",
    "alike",
    "blocks",
    "build_model",
    "computes_in_half",
    "find_head",
    "fold",
    "freeze",
    "head_classes",
    "is_library",
    "lies_contiguous",
    "normalized",
    "rate_factors",
    "reads_hub",
    "replace_head",
    "weights_info",
]
