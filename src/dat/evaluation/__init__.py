"""Evaluation: accuracy on clean images (TA), under attack (RA) and under AutoAttack (AA)."""

from dat.attacks.suites import Suite, suite
from dat.evaluation.accuracy import Accuracy, evaluate
from dat.evaluation.assess import Assessment, assess
from dat.evaluation.autoattack import AutoAttacked, autoattack
from dat.evaluation.runner import Verdicts
from dat.evaluation.sweep import Curve, sweep

__all__ = [
    "Accuracy",
    "Assessment",
    "AutoAttacked",
    "Curve",
    "Suite",
    "Verdicts",
    "assess",
    "autoattack",
    "evaluate",
    "suite",
    "sweep",
]
