"""Evidence bundles: what a claimed robust accuracy consists of, for others to check."""

from dat.evaluation.bundle.bundle import Bundle, check_path, make_bundle
from dat.evaluation.bundle.robustbench import write_submission
from dat.evaluation.bundle.verify import Check, Verification, verify

__all__ = [
    "Bundle",
    "Check",
    "Verification",
    "check_path",
    "make_bundle",
    "verify",
    "write_submission",
]
