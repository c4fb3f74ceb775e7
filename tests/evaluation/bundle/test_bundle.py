"""A bundle says what the evaluation found, and every check finds what it is there for."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from dat.attacks import FGSM, PGD, suites
from dat.core.threat import ThreatModel
from dat.data import ImageData, class_balanced_subset
from dat.distributed import World
from dat.evaluation import Assessment, Bundle, assess, autoattack, evaluate, verify
from dat.evaluation.bundle import coding, container, write_submission
from dat.evaluation.bundle.bundle import broken_rows, weights_sha256
from dat.evaluation.bundle.robustbench import _fraction
from tests.evaluation.cases import CPU, THREAT, everything

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


# A bundle whose author lies: its SHA-256 is right.

Tensors = dict[str, Tensor]


def forged(written: Written, out: Path, change: Callable[[Any, Tensors], None]) -> Path:
    contents = container.read(written[0])
    claim, tensors = copy.deepcopy(contents.claim), dict(contents.tensors)
    change(claim, tensors)
    path = out / "forged"
    container.write(path, claim, tensors)
    return path


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


# Damaged and hostile files.


def test_every_flipped_byte_is_found(written: Written, tmp_path: Path) -> None:
    data, path = written[0].read_bytes(), tmp_path / "flipped"
    step = max(len(data) // 300, 1)
    for position in (*range(0, len(data), step), *range(len(data) - 40, len(data))):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match="flipped: damaged, or not an evidence bundle"):
            Bundle.read(path)


@pytest.mark.parametrize("kept", [0, 5, 31, 32, 33, 500])
def test_truncated_files_are_found(kept: int, written: Written, tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(written[0].read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"short: (damaged|not an evidence bundle)"):
        Bundle.read(path)


def sealed(data: bytes) -> bytes:
    return data + hashlib.sha256(data).digest()


def with_claim(text: bytes) -> bytes:
    """The bytes of a file before its digest."""
    digest = torch.zeros(32, dtype=torch.uint8)
    return save({"claim": container.as_tensor(text), "sha256": digest})[:-32]


HEADER = json.dumps(
    {"claim": {"dtype": "U8", "shape": [2**60], "data_offsets": [0, 2**60]}}
).encode()
HOSTILE = {
    "nothing": sealed(b""),
    "no safetensors": sealed(b"PK\3\4 a zip of something else" * 9),
    "huge header": sealed((2**62).to_bytes(8, "little") + b"{}"),
    "huge tensor": sealed(len(HEADER).to_bytes(8, "little") + HEADER),
    "no claim": sealed(save({"sha256": torch.zeros(32, dtype=torch.uint8)})[:-32]),
    "no object": sealed(with_claim(b"[1]")),
    "deep claim": sealed(with_claim(b"[" * 100_000)),
    "not text": sealed(with_claim(b"\xff\xfe")),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_are_one_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile"
    path.write_bytes(HOSTILE[kind])
    with pytest.raises(ValueError, match=r"hostile: .*not an? (valid )?evidence bundle") as raised:
        Bundle.read(path)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


def many_images(claim: Any, tensors: Tensors) -> None:
    claim["images"] = 10**15


def large_images(claim: Any, tensors: Tensors) -> None:
    claim["shape"] = [10**6, 10**6, 10**6]


def unknown_attack(claim: Any, tensors: Tensors) -> None:
    tensors["broken_by.0"] = tensors["broken_by.0"] + 100


def floats(claim: Any, tensors: Tensors) -> None:
    tensors["correct"] = tensors["correct"].float()


def one_more(claim: Any, tensors: Tensors) -> None:
    tensors["../../a"] = torch.zeros(1)


def control_characters(claim: Any, tensors: Tensors) -> None:
    claim["suites"][0]["name"] = "\x1b[2Jautoattack"


def twice(claim: Any, tensors: Tensors) -> None:
    tensors["indices"] = torch.zeros_like(tensors["indices"])


def not_a_threat(claim: Any, tensors: Tensors) -> None:
    claim["threat"]["eps"] = float("nan")


def no_suites(claim: Any, tensors: Tensors) -> None:
    claim["suites"] = {"a": 1}


def other_format(claim: Any, tensors: Tensors) -> None:
    claim["format"] = "dat evidence bundle 2"


INVALID = (
    *(many_images, unknown_attack, floats, one_more, control_characters, twice, not_a_threat),
    *(no_suites, other_format),
)


@pytest.mark.parametrize("change", INVALID, ids=lambda it: it.__name__)
def test_invalid_claims_are_one_line(change: Any, written: Written, tmp_path: Path) -> None:
    path = forged(written, tmp_path, change)
    with pytest.raises(ValueError, match="forged: not a valid evidence bundle") as raised:
        Bundle.read(path)
    assert "\n" not in str(raised.value) and "\x1b" not in str(raised.value)


def test_nothing_of_the_claimed_size_is_allocated(
    written: Written, model: nn.Module, small_data: ImageData, tmp_path: Path
) -> None:
    result = verify(forged(written, tmp_path, large_images), model, small_data)
    assert "images" in result.failed


def bomb(claim: Any, tensors: Tensors) -> None:
    tensors["coded.0"] = container.as_tensor(zlib.compress(bytes(2**24), 9))


def test_a_bomb_is_not_unpacked(
    written: Written, model: nn.Module, small_data: ImageData, tmp_path: Path
) -> None:
    result = verify(forged(written, tmp_path, bomb), model, small_data)
    details = [check.detail for check in result.checks if not check.passed]
    assert details == ["there are more adversarial examples than broken images"]


def test_the_file_is_checked_before_the_evaluation(
    model: nn.Module, small_data: ImageData, tmp_path: Path, world: World
) -> None:
    for path in (tmp_path, tmp_path / "nowhere" / "b"):
        with pytest.raises(ValueError, match="not a file in an existing folder"):
            assess(model, small_data, ["pgd-2"], threat=THREAT, world=world, bundle=path)
    with pytest.raises(ValueError, match="bundle: need attacks="):
        evaluate(model, small_data, threat=THREAT, bundle=tmp_path / "b")  # type: ignore[call-overload]


# RobustBench.


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
