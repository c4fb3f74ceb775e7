"""Provable robustness by randomized smoothing: predict, certify, certified accuracy (CA)."""

from dat.certify.bounds import largest_radius, lower_bound, radius, upper_bound
from dat.certify.certificates import Certificate, Certified
from dat.certify.certify import certify
from dat.certify.predict import predict
from dat.certify.sampler import ABSTAIN

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
