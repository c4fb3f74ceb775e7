"""Evaluation: accuracy on clean images (TA), under attack (RA) and under AutoAttack (AA)."""

from dat.attacks.suites import Suite, suite
from dat.core.deprecation import renamed_names
from dat.evaluation.accuracy import Accuracy, evaluate
from dat.evaluation.assess import Assessment, assess
from dat.evaluation.autoattack import AutoAttackResult, autoattack
from dat.evaluation.bundle import Bundle, Verification, verify
from dat.evaluation.runner import SuiteResult
from dat.evaluation.sweep import Curve, sweep

__getattr__ = renamed_names(__name__, AutoAttacked="AutoAttackResult", Verdicts="SuiteResult")

__all__ = [
    "Accuracy",
    "Assessment",
    "AutoAttackResult",
    "Bundle",
    "Curve",
    "Suite",
    "SuiteResult",
    "Verification",
    "assess",
    "autoattack",
    "evaluate",
    "suite",
    "sweep",
    "verify",
]
