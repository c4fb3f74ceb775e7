"""DAT: distributed adversarial training of image classifiers that withstand attack.

The public names are imported on first use, so that `import dat` and `dat --help` stay quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dat.core import moved
from dat.core.lazy import lazy_names

__version__ = "0.1.0"

moved.install()

if TYPE_CHECKING:
    from dat import attacks as attacks
    from dat import objectives as objectives
    from dat.attacks import (
        APGD,
        FAB,
        FGSM,
        PGD,
        Attack,
        AttackTarget,
        NoAttack,
        Square,
        TargetedAPGD,
        attack_mode,
    )
    from dat.config import RunConfig
    from dat.core.smoothing import Smoothed
    from dat.core.threat import ThreatModel
    from dat.data import ImageData, Stream, image_data
    from dat.distributed import (
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
    from dat.evaluation import (
        Accuracy,
        Assessment,
        AutoAttackResult,
        Curve,
        Verification,
        assess,
        autoattack,
        evaluate,
        sweep,
        verify,
    )
    from dat.evaluation.certification import Certified, certify, predict
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
        AdamW,
        ClassicLARS,
        Constant,
        Cosine,
        Cyclic,
        Muon,
        OneCycle,
        OptimizerSettings,
        Piecewise,
        scale_rates,
    )
    from dat.report import Progress
    from dat.train import (
        Callback,
        GradientExchange,
        Logged,
        Options,
        RunFolder,
        Sharding,
        Trainer,
        TrainingData,
        load_weights,
        save_weights,
    )
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        renamed={"Victim": "AttackTarget", "AutoAttacked": "AutoAttackResult"},
        attacks="APGD FAB FGSM PGD Attack AttackTarget NoAttack Square TargetedAPGD attack_mode",
        distributed=(
            "Auto Buckets Chunked Dense Exchange Gather PerTensor Ring Server WholeVector World"
        ),
        config="RunConfig",
        data="ImageData Stream image_data",
        evaluation=(
            "Accuracy Assessment AutoAttackResult Curve Verification assess autoattack evaluate "
            "sweep verify"
        ),
        export="export_run load",
        models="Normalize Resized build_model fold freeze normalized rate_factors replace_head",
        objectives="Adversarial Batch Objective Smooth Stability",
        optim=(
            "EMA LALR LAMB LARS LSGD SGD AdamW ClassicLARS Constant Cosine Cyclic Muon OneCycle "
            "OptimizerSettings Piecewise scale_rates"
        ),
        report="Progress",
        train=(
            "Callback GradientExchange Logged Options RunFolder Sharding Trainer TrainingData "
            "load_weights save_weights"
        ),
        **{
            "core.smoothing": "Smoothed",
            "core.threat": "ThreatModel",
            "evaluation.certification": "Certified certify predict",
        },
    )

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
    "AdamW",
    "Adversarial",
    "Assessment",
    "Attack",
    "AttackTarget",
    "Auto",
    "AutoAttackResult",
    "Batch",
    "Buckets",
    "Callback",
    "Certified",
    "Chunked",
    "ClassicLARS",
    "Constant",
    "Cosine",
    "Curve",
    "Cyclic",
    "Dense",
    "Exchange",
    "Gather",
    "GradientExchange",
    "ImageData",
    "Logged",
    "Muon",
    "NoAttack",
    "Normalize",
    "Objective",
    "OneCycle",
    "OptimizerSettings",
    "Options",
    "PerTensor",
    "Piecewise",
    "Progress",
    "Resized",
    "Ring",
    "RunConfig",
    "RunFolder",
    "Server",
    "Sharding",
    "Smooth",
    "Smoothed",
    "Square",
    "Stability",
    "Stream",
    "TargetedAPGD",
    "ThreatModel",
    "Trainer",
    "TrainingData",
    "Verification",
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
    "image_data",
    "load",
    "load_weights",
    "normalized",
    "predict",
    "rate_factors",
    "replace_head",
    "save_weights",
    "scale_rates",
    "sweep",
    "verify",
]
