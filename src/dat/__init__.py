"""DAT: distributed adversarial training of image classifiers that withstand attack.

The public names are imported on first use, so that `import dat` and `dat --help` stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dat.attacks import (
        APGD,
        FAB,
        FGSM,
        PGD,
        Attack,
        NoAttack,
        Square,
        TargetedAPGD,
        Victim,
        attack_mode,
    )
    from dat.certification import Certified, certify, predict
    from dat.comm import (
        Auto,
        Buckets,
        Chunked,
        Dense,
        Exchange,
        Gather,
        PerTensor,
        Ring,
        Server,
        WholeVector,
        World,
    )
    from dat.config import RunConfig
    from dat.data import ImageData
    from dat.evaluation import (
        Accuracy,
        Assessment,
        AutoAttacked,
        Curve,
        assess,
        autoattack,
        evaluate,
        sweep,
    )
    from dat.export import export_run, load
    from dat.models import (
        Normalize,
        Resized,
        build_model,
        fold,
        freeze,
        normalized,
        rate_factors,
        replace_head,
    )
    from dat.objectives import Adversarial, Batch, Objective, Smooth, Stability
    from dat.optim import (
        EMA,
        LALR,
        LAMB,
        LARS,
        LSGD,
        SGD,
        Constant,
        Cosine,
        Cyclic,
        Piecewise,
        scale_rates,
    )
    from dat.report import Progress
    from dat.smoothing import Smoothed
    from dat.threat import ThreatModel
    from dat.train import Logged, RunFolder, Trainer, load_weights, save_weights

_ROOMS = {
    "attacks": (
        "APGD",
        "FAB",
        "FGSM",
        "PGD",
        "Attack",
        "NoAttack",
        "Square",
        "TargetedAPGD",
        "Victim",
        "attack_mode",
    ),
    "certification": ("Certified", "certify", "predict"),
    "comm": (
        "Auto",
        "Buckets",
        "Chunked",
        "Dense",
        "Exchange",
        "Gather",
        "PerTensor",
        "Ring",
        "Server",
        "WholeVector",
        "World",
    ),
    "config": ("RunConfig",),
    "data": ("ImageData",),
    "evaluation": (
        "Accuracy",
        "Assessment",
        "AutoAttacked",
        "Curve",
        "assess",
        "autoattack",
        "evaluate",
        "sweep",
    ),
    "export": ("export_run", "load"),
    "models": (
        "Normalize",
        "Resized",
        "build_model",
        "fold",
        "freeze",
        "normalized",
        "rate_factors",
        "replace_head",
    ),
    "objectives": ("Adversarial", "Batch", "Objective", "Smooth", "Stability"),
    "optim": (
        "EMA",
        "LALR",
        "LAMB",
        "LARS",
        "LSGD",
        "SGD",
        "Constant",
        "Cosine",
        "Cyclic",
        "Piecewise",
        "scale_rates",
    ),
    "report": ("Progress",),
    "smoothing": ("Smoothed",),
    "threat": ("ThreatModel",),
    "train": ("Logged", "RunFolder", "Trainer", "load_weights", "save_weights"),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "APGD",
    "EMA",
    "FAB",
    "FGSM",
    "LALR",
    "LAMB",
    "LARS",
    "LSGD",
    "PGD",
    "SGD",
    "Accuracy",
    "Adversarial",
    "Assessment",
    "Attack",
    "Auto",
    "AutoAttacked",
    "Batch",
    "Buckets",
    "Certified",
    "Chunked",
    "Constant",
    "Cosine",
    "Curve",
    "Cyclic",
    "Dense",
    "Exchange",
    "Gather",
    "ImageData",
    "Logged",
    "NoAttack",
    "Normalize",
    "Objective",
    "PerTensor",
    "Piecewise",
    "Progress",
    "Resized",
    "Ring",
    "RunConfig",
    "RunFolder",
    "Server",
    "Smooth",
    "Smoothed",
    "Square",
    "Stability",
    "TargetedAPGD",
    "ThreatModel",
    "Trainer",
    "Victim",
    "WholeVector",
    "World",
    "assess",
    "attack_mode",
    "autoattack",
    "build_model",
    "certify",
    "evaluate",
    "export_run",
    "fold",
    "freeze",
    "load",
    "load_weights",
    "normalized",
    "predict",
    "rate_factors",
    "replace_head",
    "save_weights",
    "scale_rates",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dat' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"dat.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
