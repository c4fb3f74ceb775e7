"""A bundle whose author lies, and seals it: every check finds what it is there for."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dat.data import ImageData
from dat.evaluation import Bundle, verify
from dat.evaluation.bundle import coding, container
from dat.evaluation.bundle.bundle import broken_rows
from tests.evaluation.bundle.forging import Tensors, Written, forged
from tests.evaluation.cases import CPU, THREAT


def with_examples(
    bundle: Bundle, data: ImageData, change: Callable[[Tensor, Tensor], Tensor], out: Path
) -> Path:
    """The bundle with other examples in its first suite, and the digest of these."""
    digest, pairs = hashlib.sha256(), []
    for rows, x_adv in bundle.examples(0, data):
        x, _ = data.batch(rows, CPU)
        changed = change(x_adv.clone(), x)
        digest.update(changed.numpy().tobytes())
        pairs.append((changed, x))
    coded = container.as_tensor(coding.encode(pairs, bundle.claim.threat.eps))
    suite = replace(bundle.claim.suites[0], examples=digest.hexdigest())
    claim = replace(bundle.claim, suites=(suite, *bundle.claim.suites[1:]))
    path = out / "forged"
    replace(bundle, claim=claim, coded=(coded, *bundle.coded[1:])).write(path)
    return path


def one_too_far(x_adv: Tensor, x: Tensor) -> Tensor:
    x_adv[3, 0, 4, 4] = x[3, 0, 4, 4] + THREAT.eps * 1.001
    return x_adv


def outside_the_box(x_adv: Tensor, x: Tensor) -> Tensor:
    dark = int(x[2].flatten().argmin())
    x_adv[2].view(-1)[dark] = -0.001
    return x_adv


def not_a_number(x_adv: Tensor, x: Tensor) -> Tensor:
    x_adv[1] = float("nan")
    return x_adv


def the_images(x_adv: Tensor, x: Tensor) -> Tensor:
    return x


EXAMPLES = {
    one_too_far: ("short: perturbations", "1 of .* outside of linf 0.08"),
    outside_the_box: ("short: perturbations", "1 of .* outside of linf 0.08"),
    not_a_number: ("short: perturbations", "1 of .* outside of linf 0.08"),
    the_images: ("short: misclassified", "not misclassified"),
}


@pytest.mark.parametrize("change", EXAMPLES, ids=lambda it: it.__name__)
def test_wrong_examples_are_found(
    change: Any, bundle: Bundle, model: nn.Module, small_data: ImageData, tmp_path: Path
) -> None:
    name, message = EXAMPLES[change]
    result = verify(with_examples(bundle, small_data, change, tmp_path), model, small_data)
    assert result.failed == (name,)
    (failed,) = (check.detail for check in result.checks if not check.passed)
    assert re.search(message, failed)


def other_ta(claim: Any, tensors: Tensors) -> None:
    claim["ta"] += 1


def other_ra(claim: Any, tensors: Tensors) -> None:
    claim["suites"][0]["ra"] += 1


def other_count(claim: Any, tensors: Tensors) -> None:
    claim["suites"][1]["broken"]["pgd-2"] -= 1


def other_weights(claim: Any, tensors: Tensors) -> None:
    claim["weights"] = "0" * 64


def other_digest(claim: Any, tensors: Tensors) -> None:
    tensors["images"] = tensors["images"].clone()
    tensors["images"][7, 3] += 1


def other_index(claim: Any, tensors: Tensors) -> None:
    tensors["indices"] = tensors["indices"].clone()
    tensors["indices"][-1] += 1000


def other_sum(claim: Any, tensors: Tensors) -> None:
    claim["suites"][0]["examples"] = "0" * 64


def other_eps(claim: Any, tensors: Tensors) -> None:
    claim["threat"]["eps"] = 0.04


def other_verdict(claim: Any, tensors: Tensors) -> None:
    """An image that fell is said to withstand, with figures to match."""
    broken_by = tensors["broken_by.1"].clone()
    broken_by[broken_rows(broken_by)[0]] = 0
    tensors["broken_by.1"] = broken_by
    suite = claim["suites"][1]
    suite["broken"]["pgd-2"] -= 1
    suite["ra"] = 100.0 * int((broken_by == 0).sum()) / len(broken_by)


def other_correct(claim: Any, tensors: Tensors) -> None:
    """An image that is misclassified is said to be correct and robust, with figures to match."""
    row = int((tensors["correct"] == 0).nonzero()[0])
    tensors["correct"] = tensors["correct"].clone()
    tensors["correct"][row] = 1
    claim["correct"] += 1
    claim["ta"] = 100.0 * claim["correct"] / claim["images"]
    for number, suite in enumerate(claim["suites"]):
        broken_by = tensors[f"broken_by.{number}"] = tensors[f"broken_by.{number}"].clone()
        broken_by[row] = 0
        suite["ra"] = 100.0 * int((broken_by == 0).sum()) / len(broken_by)


FORGED: dict[Callable[[Any, Tensors], None], set[str]] = {
    other_ta: {"numbers"},
    other_ra: {"numbers"},
    other_count: {"numbers"},
    other_weights: {"model"},
    other_digest: {"images", "clean", "short", "pgd-2"},
    other_index: {"images", "clean", "short", "pgd-2"},
    other_sum: {"short: perturbations"},
    other_verdict: {"pgd-2"},
    other_correct: {"clean"},
}


@pytest.mark.parametrize("change", FORGED, ids=lambda it: it.__name__)
def test_false_claims_are_found(
    change: Any, written: Written, model: nn.Module, small_data: ImageData, tmp_path: Path
) -> None:
    result = verify(forged(written, tmp_path, change), model, small_data)
    assert set(result.failed) == FORGED[change], result.checks


def test_a_smaller_eps_is_found(
    written: Written, model: nn.Module, small_data: ImageData, tmp_path: Path
) -> None:
    result = verify(forged(written, tmp_path, other_eps), model, small_data)
    assert not result.passed


def test_another_model_is_found(written: Written, model: nn.Module, small_data: ImageData) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1e-6
    assert verify(written[0], other, small_data).failed == ("model",)
    with torch.no_grad():
        next(other.parameters()).neg_()
    assert {"model", "clean"} <= set(verify(written[0], other, small_data).failed)


@pytest.mark.parametrize("kind", ["pixel", "label", "fewer", "shape"])
def test_other_images_are_found(
    kind: str, written: Written, model: nn.Module, small_data: ImageData
) -> None:
    images, labels = small_data.tensor().clone(), small_data.labels.clone()
    if kind == "pixel":
        images[11, 0, 0, 0] += 1e-6
    elif kind == "label":
        labels[11] = (labels[11] + 1) % 10
    elif kind == "fewer":
        images, labels = images[:50], labels[:50]
    else:
        images = images[:, :, :7]
    other = ImageData.of(images, labels, classes=10)
    result = verify(written[0], model, other)
    assert set(result.failed) == {"images", "clean", "short", "pgd-2"}
    message = {"fewer": "10 of 60 are not in", "shape": "of shape"}.get(kind, "image 11")
    assert message in result.checks[1].detail
