"""Check a bundle against a model and a dataset, without attacking."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dat.attacks import AttackTarget, attack_mode
from dat.core.rng import seeded
from dat.core.threat import TOLERANCE, ThreatModel, show_radius
from dat.data import Data, ImageData, image_data
from dat.distributed import World
from dat.evaluation.bundle.bundle import (
    Bundle,
    broken_rows,
    image_digests,
    percent,
    weights_sha256,
)
from dat.evaluation.workers import world_of
from dat.models import adapted, lies_contiguous

ROUNDING = 1e-5
"""Margins up to this, relative to the largest logit, may have another sign on other hardware."""
NOT_CHECKED = "not checked: the images are not those of the bundle"


class Check(NamedTuple):
    """One property of a bundle."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Verification:
    """The result of checking a bundle."""

    bundle: Bundle
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of the checks that failed."""
        return tuple(check.name for check in self.checks if not check.passed)


@torch.inference_mode(False)
def verify(
    path: Path | str, model: nn.Module, data: Data, *, batch: int = 256, world: World | None = None
) -> Verification:
    """Check the evidence bundle that `dat.evaluate(..., bundle=path)` wrote, without attacking.

    `model` maps images in [0, 1] to logits, and `data` is the complete test set, or the images that
    were evaluated. The checks: the file is undamaged, the images and the model are the same, the
    numbers add up, the images are classified as claimed, and each adversarial example is within the
    threat model and misclassified. A `ValueError` says that the file is no bundle, or is damaged.

    This proves an upper bound on the robust accuracy, and nothing about the images that withstood
    the attacks: another attack may break them.
    """
    bundle, data = Bundle.read(Path(path)), image_data(data)
    device = (world_of(model) if world is None else world).device
    checks = [Check("file", True, f"SHA-256 {bundle.digest}")]
    subset, images = _check_images(bundle, data)
    checks += [images, _check_model(bundle, model), _check_numbers(bundle)]
    names = [suite.name for suite in bundle.claim.suites]
    if subset is None:
        checks += [Check(name, False, NOT_CHECKED) for name in ("clean", *names)]
        return Verification(bundle, tuple(checks))
    x, _ = subset.batch(torch.arange(1), device)
    classifier = _Classifier(adapted(model, x), device, batch)
    with attack_mode(classifier.model), seeded(device, bundle.claim.seed, "verify"):
        checks.append(_check_clean(bundle, subset, classifier))
        for number in range(len(names)):
            checks += _check_suite(bundle, number, subset, classifier)
    return Verification(bundle, tuple(checks))


class _Outcome(NamedTuple):
    """How images are classified."""

    wrong: Tensor
    close: Tensor
    """Whether rounding may decide."""


@dataclass(frozen=True)
class _Classifier:
    """Classifies images batch by batch."""

    model: nn.Module
    device: torch.device
    batch: int

    @torch.no_grad()
    def outcome(self, images: Tensor, labels: Tensor) -> _Outcome:
        batches = zip(images.split(self.batch), labels.split(self.batch), strict=True)
        outcomes = [self._outcome(x.to(self.device), y.to(self.device)) for x, y in batches]
        return _Outcome(*(torch.cat(parts).cpu() for parts in zip(*outcomes, strict=True)))

    def _outcome(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if not lies_contiguous(self.model):
            x = x.contiguous(memory_format=torch.channels_last)
        logits = self.model(x).float()
        wrong = AttackTarget(self.model, y).misclassified(logits)
        own = logits.gather(1, y.unsqueeze(1))
        others = logits.scatter(1, y.unsqueeze(1), float("-inf")).amax(1, keepdim=True)
        scale = logits.abs().amax(1, keepdim=True)
        return wrong, ((own - others).abs() <= ROUNDING * scale).squeeze(1)


def _check_images(bundle: Bundle, data: ImageData) -> tuple[ImageData | None, Check]:
    """The images of the bundle, if the dataset has them."""
    name, n = "images", bundle.claim.images
    if data.shape != bundle.claim.shape:
        detail = f"of shape {bundle.claim.shape}, but those of the dataset are {data.shape}"
        return None, Check(name, False, detail)
    try:
        subset = bundle.images_of(data)
    except ValueError as error:
        return None, Check(name, False, str(error))
    differs = (image_digests(subset) != bundle.images).any(1)
    if differs.any():
        first = int(bundle.indices[differs][0])
        detail = f"{int(differs.sum())} of {n} images or labels differ, first that of image {first}"
        return None, Check(name, False, detail)
    detail = f"{n:,} of the dataset's {len(data):,}, with the same pixels and labels"
    return subset, Check(name, True, detail)


def _check_model(bundle: Bundle, model: nn.Module) -> Check:
    actual = weights_sha256(model)
    if actual == bundle.claim.weights:
        return Check("model", True, f"weights have SHA-256 {actual}")
    detail = f"other weights: SHA-256 {actual}, not {bundle.claim.weights}"
    return Check("model", False, detail)


def _check_numbers(bundle: Bundle) -> Check:
    """Whether the figures follow from what is said of each image."""
    claim, wrong = bundle.claim, []
    correct = int(bundle.correct.sum())
    if (claim.correct, claim.ta) != (correct, percent(correct, claim.images)):
        wrong.append(f"TA is {claim.ta:.2f} %, but {correct} of {claim.images} are correct")
    for suite, broken_by in zip(claim.suites, bundle.broken_by, strict=True):
        counts = {name: int((broken_by == i).sum()) for i, name in enumerate(suite.attacks, 1)}
        robust = int((broken_by == 0).sum())
        if not torch.equal(broken_by != -1, bundle.correct):
            wrong.append(f"{suite.name} attacks other images than those classified correctly")
        if suite.broken != counts:
            wrong.append(f"{suite.name} breaks {counts}, not {suite.broken}")
        if suite.ra != percent(robust, claim.images):
            wrong.append(
                f"RA under {suite.name} is {suite.ra:.2f} %, but {robust} of {claim.images} "
                "withstand it"
            )
    if wrong:
        return Check("numbers", False, "; ".join(wrong))
    figures = [f"TA {claim.ta:.2f} %", *(f"{s.name} {s.ra:.2f} %" for s in claim.suites)]
    return Check("numbers", True, ", ".join(figures))


def _check_clean(bundle: Bundle, data: ImageData, classifier: _Classifier) -> Check:
    outcomes = [
        classifier.outcome(*data.batch(rows, torch.device("cpu")))
        for rows in torch.arange(len(data)).split(classifier.batch)
    ]
    wrong, close = (torch.cat(parts) for parts in zip(*outcomes, strict=True))
    differs = wrong == bundle.correct
    failed = int((differs & ~close).sum())
    if failed:
        return Check("clean", False, f"{failed} of {len(data)} are not classified as claimed")
    correct = int(bundle.correct.sum())
    detail = f"{correct:,} classified correctly, {len(data) - correct:,} not"
    return Check("clean", True, detail + _rounding(differs))


def _check_suite(
    bundle: Bundle, number: int, data: ImageData, classifier: _Classifier
) -> Iterator[Check]:
    """Whether the adversarial examples are in the threat model, and misclassified."""
    suite, threat = bundle.claim.suites[number], bundle.claim.threat
    count = len(broken_rows(bundle.broken_by[number]))
    digest, largest, outside = hashlib.sha256(), 0.0, 0
    right, close = [], []
    try:
        for rows, examples in bundle.examples(number, data):
            digest.update(examples.numpy().tobytes())
            x, y = data.batch(rows, torch.device("cpu"))
            sizes, inside = _inside(threat, examples, x)
            largest, outside = max(largest, float(sizes.max())), outside + int((~inside).sum())
            outcome = classifier.outcome(examples, y)
            right.append(~outcome.wrong)
            close.append(outcome.close)
    except ValueError as error:
        yield Check(suite.name, False, str(error))
        return
    ball = f"{threat.norm} {show_radius(threat.eps)} and [0, 1]"
    if digest.hexdigest() != suite.examples:
        detail = "the adversarial examples do not have the SHA-256 that the claim names"
        yield Check(f"{suite.name}: perturbations", False, detail)
    elif outside:
        detail = f"{outside} of {count} are outside of {ball}; the largest is {largest:.4g}"
        yield Check(f"{suite.name}: perturbations", False, detail)
    else:
        detail = f"{count:,} within {ball}; the largest is {largest:.4g}"
        yield Check(f"{suite.name}: perturbations", True, detail)
    correct = torch.cat([*right, torch.zeros(0, dtype=torch.bool)])
    failed = int((correct & ~torch.cat([*close, torch.zeros(0, dtype=torch.bool)])).sum())
    name = f"{suite.name}: misclassified"
    if failed:
        yield Check(name, False, f"{failed} of {count} adversarial examples are not misclassified")
    else:
        yield Check(name, True, f"all {count:,} adversarial examples" + _rounding(correct))


def _inside(threat: ThreatModel, x_adv: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The size of each perturbation, computed in double precision, and whether the example is in
    the ball and in [0, 1]; False for NaN. Attacks compute in float32, hence the tolerance."""
    sizes = threat.size(x_adv.double(), x.double())
    pixels = ((x_adv >= 0) & (x_adv <= 1)).flatten(1).all(1)
    return sizes, pixels & (sizes <= threat.eps + TOLERANCE * max(1.0, threat.eps))


def _rounding(differs: Tensor) -> str:
    """A remark on the images whose class differs from the claim within rounding."""
    count = int(differs.sum())
    return f"; {count} of them as far as rounding allows to tell" if count else ""
