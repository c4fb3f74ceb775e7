"""Evaluation: TA on clean images, RA under attack, AA under AutoAttack; by all workers, exact."""

from dat.evaluation.accuracy import Accuracy, evaluate
from dat.evaluation.assess import Assessment, assess
from dat.evaluation.autoattack import AutoAttacked, autoattack
from dat.evaluation.suites import Suite, suite
from dat.evaluation.survey import Verdicts
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
