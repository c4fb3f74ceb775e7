"""What RobustBench asks for: the adversarial images as a `.pt` tensor, and the claim as JSON."""

from __future__ import annotations

import io
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dat.core.files import atomic_write
from dat.data import ImageData
from dat.evaluation.bundle.bundle import Bundle, percent

IMAGES = "adversarial.pt"
CLAIM = "claim.json"
TO_FILL_IN = ("link", "name", "authors", "venue", "architecture", "footnote")
"""What only the author knows."""
AUTOATTACK = "autoattack"
LARGEST_DENOMINATOR = 255


def write_submission(bundle: Bundle, data: ImageData, folder: Path, dataset: str = "") -> list[str]:
    """Write the submission to a folder, and return the names of its files. `data` has the images
    of the bundle; verify it first.

    The tensor has one image per test image: the adversarial example of the first suite that broke
    it, otherwise the image itself. `torch.load(..., weights_only=True)` reads it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    images = io.BytesIO()
    torch.save(_adversarial_images(bundle, data), images)
    atomic_write(folder / IMAGES, images.getvalue())
    text = json.dumps(_claim(bundle, dataset), indent=2) + "\n"
    atomic_write(folder / CLAIM, text.encode())
    return [IMAGES, CLAIM]


def _adversarial_images(bundle: Bundle, data: ImageData) -> Tensor:
    images, _ = data.batch(torch.arange(len(data)), torch.device("cpu"))
    images = images.float().clone()
    for number in reversed(range(len(bundle.claim.suites))):
        for rows, examples in bundle.examples(number, data):
            images[rows] = examples
    return images


def _claim(bundle: Bundle, dataset: str) -> dict[str, Any]:
    """The entries of RobustBench's model_info files, as far as the bundle has them."""
    claim = bundle.claim
    broken = torch.stack([~bundle.correct, *(by > 0 for by in bundle.broken_by)]).any(0)
    robust = percent(int((~broken).sum()), claim.images)
    entries: dict[str, Any] = dict.fromkeys(TO_FILL_IN, "")
    entries |= {"dataset": dataset, "eps": _fraction(claim.threat.eps)}
    entries |= {"clean_acc": f"{claim.ta:.2f}", "reported": f"{robust:.2f}"}
    for suite in claim.suites:
        if suite.name == AUTOATTACK:
            entries["autoattack_acc"] = f"{suite.ra:.2f}"
    if {suite.name for suite in claim.suites} - {AUTOATTACK}:
        entries["external"] = f"{robust:.2f}"
    entries["threat_model"] = {"linf": "Linf", "l2": "L2"}[claim.threat.norm]
    entries["images"] = claim.images
    entries["bundle_sha256"] = bundle.digest
    return entries


def _fraction(eps: float) -> str:
    """8/255 rather than 0.03137, but 0.3."""
    fraction = Fraction(eps).limit_denominator(LARGEST_DENOMINATOR)
    short = float(f"{eps:.3g}") == eps
    if short or abs(float(fraction) - eps) > 1e-9 or 255 % fraction.denominator:
        return f"{eps:g}"
    return f"{fraction * 255}/255"
