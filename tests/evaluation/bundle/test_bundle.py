"""A bundle says what the evaluation found, and is verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dat.attacks import FGSM, PGD, suites
from dat.core.threat import ThreatModel
from dat.data import ImageData, class_balanced_subset
from dat.distributed import World
from dat.evaluation import Assessment, Bundle, assess, autoattack, evaluate, verify
from dat.evaluation.bundle import write_submission
from dat.evaluation.bundle.bundle import broken_rows, weights_sha256
from dat.evaluation.bundle.robustbench import _fraction
from tests.evaluation.cases import THREAT, everything

Written = tuple[Path, Assessment]


def test_a_bundle_has_the_results_and_the_examples(
    written: Written, bundle: Bundle, small_data: ImageData
) -> None:
    _, result = written
    claim = bundle.claim
    assert (claim.images, claim.ta, claim.threat) == (60, result.ta, THREAT)
    assert [suite.name for suite in claim.suites] == list(result.suites)
    assert torch.equal(bundle.correct, result.right)
    for number, suite in enumerate(claim.suites):
        expected = result.suites[suite.name]
        assert (suite.ra, suite.broken) == (result.ra(suite.name), expected.counts())
        assert torch.equal(bundle.broken_by[number], expected.broken_by)
        examples = list(bundle.examples(number, small_data))
        rows, x_adv = (torch.cat(parts) for parts in zip(*examples, strict=True))
        assert expected.examples is not None
        assert torch.equal(rows, broken_rows(expected.broken_by)) and len(rows) > 5
        assert torch.equal(x_adv, expected.examples[rows])


def test_a_bundle_is_verified(
    written: Written, model: nn.Module, small_data: ImageData, data: ImageData
) -> None:
    for images in (small_data, data):  # the evaluated images, or all
        result = verify(written[0], model, images)
        assert result.passed, result.checks
    assert [check.name for check in result.checks] == [
        *("file", "images", "model", "numbers", "clean"),
        *("short: perturbations", "short: misclassified"),
        *("pgd-2: perturbations", "pgd-2: misclassified"),
    ]
    assert "60 of the dataset's 150" in result.checks[1].detail


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_subset_of_the_test_set_is_verified(
    norm: str, model: nn.Module, data: ImageData, tmp_path: Path
) -> None:
    threat = ThreatModel(norm=norm, eps=THREAT.eps if norm == "linf" else 0.5)
    subset = class_balanced_subset(data, 30)
    attacks = ["fab-t-3", "square-10", "apgd-ce-3"]
    path = tmp_path / "b"
    result = evaluate(model, subset, threat=threat, attacks=attacks, check=False, bundle=path)
    assert result.suites["apgd-ce-3"].examples is not None
    verification = verify(path, model, data)
    assert verification.passed, verification.checks
    assert verification.bundle.indices.tolist() == subset.number(torch.arange(30)).tolist()


def test_autoattack_writes_a_bundle(
    model: nn.Module, small_data: ImageData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = {"fgsm": FGSM(), "pgd": PGD(steps=2)}
    monkeypatch.setitem(suites.SUITES, "autoattack", lambda classes: quick)
    x, y = everything(small_data)
    result = autoattack(model, x, y, eps=THREAT.eps, bundle=tmp_path / "aa")
    verification = verify(tmp_path / "aa", model, (x, y))
    assert verification.passed
    assert verification.bundle.claim.suites[0].ra == result.ra


def test_nothing_broken_and_no_suite(model: nn.Module, data: ImageData, tmp_path: Path) -> None:
    subset, path = data.take(torch.arange(5)), tmp_path / "b"
    threat = ThreatModel(eps=0.0)
    assess(model, subset, ["clean", "fgsm"], threat=threat, check=False, bundle=path)
    result = verify(path, model, subset)
    assert result.passed, result.checks
    assert [suite.name for suite in result.bundle.claim.suites] == ["fgsm"]


@pytest.mark.parametrize("batch", [7, 64])
def test_batches_of_64_or_more_give_the_same_bytes(
    batch: int, model: nn.Module, data: ImageData, tmp_path: Path
) -> None:
    for name, size in (("a", 100), ("b", batch)):
        attacks = ["pgd-2", "fab-t-2"]
        options: dict[str, Any] = {"check": False, "bundle": tmp_path / name, "batch": size}
        assess(model, data, attacks, threat=THREAT, **options)
    same = (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert same == (batch >= 64)  # the claim names the batch


def test_a_bundle_resumes_apart_from_other_evaluations(
    model: nn.Module, small_data: ImageData, tmp_path: Path
) -> None:
    """Examples from other batches may differ in the last bits."""
    options: dict[str, Any] = {"threat": THREAT, "check": False, "folder": tmp_path / "folder"}
    assess(model, small_data, ["pgd-2"], keep=True, **options)
    for name in ("a", "b"):
        assess(model, small_data, ["pgd-2"], bundle=tmp_path / name, **options)
    assert len(list((tmp_path / "folder").iterdir())) == 2
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_weights_are_hashed_in_the_order_of_their_names(model: nn.Module) -> None:
    class Reversed(nn.Module):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return dict(reversed(model.state_dict().items()))

    assert weights_sha256(Reversed()) == weights_sha256(model)
    assert weights_sha256(nn.Linear(2, 2)) != weights_sha256(nn.Linear(2, 2))


def test_the_file_is_checked_before_the_evaluation(
    model: nn.Module, small_data: ImageData, tmp_path: Path, world: World
) -> None:
    for path in (tmp_path, tmp_path / "nowhere" / "b"):
        with pytest.raises(ValueError, match="not a file in an existing folder"):
            assess(model, small_data, ["pgd-2"], threat=THREAT, world=world, bundle=path)
    with pytest.raises(ValueError, match="bundle: need attacks="):
        evaluate(model, small_data, threat=THREAT, bundle=tmp_path / "b")  # type: ignore[call-overload]


def test_a_submission_to_robustbench(
    written: Written, bundle: Bundle, model: nn.Module, small_data: ImageData, tmp_path: Path
) -> None:
    _, result = written
    files = write_submission(bundle, small_data, tmp_path / "submission", "digits")
    assert sorted(path.name for path in (tmp_path / "submission").iterdir()) == sorted(files)
    x_adv = torch.load(tmp_path / "submission" / files[0], weights_only=True)
    assert x_adv.dtype == torch.float32 and x_adv.shape == small_data.images.shape
    x, y = everything(small_data)
    assert THREAT.size(x_adv, x).max() <= THREAT.eps + 1e-6
    with torch.no_grad():
        robust = model(x_adv).argmax(1) == y
    both = torch.stack([suite.robust for suite in result.suites.values()]).all(0)
    assert torch.equal(robust, both)
    claim = json.loads((tmp_path / "submission" / files[1]).read_text())
    assert claim["external"] == f"{100 * float(both.double().mean()):.2f}"
    assert claim["clean_acc"] == f"{result.ta:.2f}" and claim["dataset"] == "digits"
    assert claim["bundle_sha256"] == bundle.digest


@pytest.mark.parametrize(
    ("eps", "written_as"), [(8 / 255, "8/255"), (0.3, "0.3"), (0.2, "0.2"), (4 / 255, "4/255")]
)
def test_eps_is_written_as_robustbench_does(eps: float, written_as: str) -> None:
    assert _fraction(eps) == written_as


def test_the_file_is_plain_safetensors(written: Written) -> None:
    tensors = load_file(written[0])
    assert {"claim", "indices", "images", "correct", "coded.0", "coded.1"} <= tensors.keys()
