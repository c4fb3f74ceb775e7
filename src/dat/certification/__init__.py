"""Provable robustness by randomized smoothing: predict, certify, certified accuracy (CA)."""

from dat.certification.bounds import largest_radius, lower_bound, radius, upper_bound
from dat.certification.certificates import Certificate, Certified
from dat.certification.certify import certify
from dat.certification.predict import predict
from dat.certification.sampler import ABSTAIN

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
