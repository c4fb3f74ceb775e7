"""Certified robustness by randomized smoothing: predict, certify, certified accuracy (CA)."""

from dat.evaluation.certification.bounds import largest_radius, lower_bound, radius, upper_bound
from dat.evaluation.certification.certificates import Certificate, Certified
from dat.evaluation.certification.certify import certify
from dat.evaluation.certification.predict import predict
from dat.evaluation.certification.sampler import ABSTAIN

__all__ = [
    "ABSTAIN",
    "Certificate",
    "Certified",
    "certify",
    "largest_radius",
    "lower_bound",
    "predict",
    "radius",
    "upper_bound",
]
