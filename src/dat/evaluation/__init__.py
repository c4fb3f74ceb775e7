"""Evaluation: TA on clean images and RA under attack, split among the workers, counted exactly."""

from dat.evaluation.accuracy import Accuracy, evaluate

__all__ = ["Accuracy", "evaluate"]
