"""`dat evaluate --bundle` and `dat verify`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dat.cli import main
from dat.config.build import make_model
from dat.config.schema import RunConfig
from dat.data import load
from dat.export import export_run
from dat.train import save_weights

CONFIG: dict[str, Any] = {
    "model": {"name": "cnn", "width": 4},
    "data": {"name": "digits"},
    "evaluate": {"attacks": ["pgd-2"], "images": 40},
}
EVALUATE = ("evaluate", "run", "--out", "none", "--no-checks", "--quiet", "--bundle", "evidence")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_launcher: None) -> Path:
    """A run's folder, without training."""
    monkeypatch.chdir(tmp_path)
    config = RunConfig.read(CONFIG)
    Path("run").mkdir()
    Path("run/config.yaml").write_text(yaml.safe_dump({"recipe": "mine"} | config.dump()))
    model = make_model(config, load("digits"))
    save_weights(model, Path("run/best.safetensors"))
    with torch.no_grad():
        next(model.parameters()).mul_(1 + 1e-6)
    save_weights(model, Path("run/last.safetensors"))
    return tmp_path


def call(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[Any, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code, *capsys.readouterr()


def test_evidence_is_written_and_verified(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(EVALUATE, capsys)
    assert (code, err) == (0, "") and "dat verify evidence --model run" in out
    code, out, err = call(("verify", "evidence", "--model", "run"), capsys)
    assert (code, err) == (0, "")
    header, *rows = out.split("\n\n")[0].splitlines()
    assert header.split() == ["Check", "Result", "Detail"]
    assert len(rows) == 7 and all(" passed " in row for row in rows)
    assert "Verified on 40 images: TA" in out and "Not proven: that the images" in out
    code, out, _ = call(("verify", "evidence", "--model", "run", "--json"), capsys)
    report = json.loads(out)
    assert report["passed"] and report["claim"]["images"] == 40
    assert [check["name"] for check in report["checks"]][:3] == ["file", "images", "model"]


def test_other_weights_fail(capsys: pytest.CaptureFixture[str]) -> None:
    call(EVALUATE, capsys)
    for words in (["run", "--weights", "last"], ["run/last.safetensors"]):
        code, out, err = call(("verify", "evidence", "--model", *words), capsys)
        assert (code, err) == (1, "")
        assert "FAILED  other weights: SHA-256" in out and "NOT VERIFIED: model" in out
    assert call(("verify", "evidence", "--model", "run/best.safetensors"), capsys)[0] == 0


def test_an_exported_model_is_the_same_model(capsys: pytest.CaptureFixture[str]) -> None:
    call(EVALUATE, capsys)
    export_run("run", out="exported")
    command = ("verify", "evidence", "--model", "exported")
    assert call((*command, "--data", "digits"), capsys)[0] == 0
    code, _, err = call(command, capsys)
    assert (code, err) == (2, "error: --model: requires --data, the images that were evaluated\n")


def test_a_submission_has_only_verified_images(capsys: pytest.CaptureFixture[str]) -> None:
    call(EVALUATE, capsys)
    command = ("verify", "evidence", "--robustbench", "submission", "--model")
    code, out, _ = call((*command, "run/last.safetensors"), capsys)
    assert code == 1 and not Path("submission").exists()
    code, out, _ = call((*command, "run"), capsys)
    assert code == 0 and "asks for all 360 test images; this bundle has 40" in out
    assert {path.name for path in Path("submission").iterdir()} == {"adversarial.pt", "claim.json"}


def test_a_damaged_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("evidence").write_bytes(b"damaged")
    for path, message in (("evidence", "damaged, or not an evidence"), ("no", "no such bundle")):
        code, out, err = call(("verify", path, "--model", "run"), capsys)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: {path}: {message}") and err.count("\n") == 1


def test_a_bundle_that_cannot_be_written_is_refused_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = call((*EVALUATE[:-1], "no/folder/evidence"), capsys)
    assert (code, err) == (2, "error: no/folder/evidence: not a file in an existing folder\n")
