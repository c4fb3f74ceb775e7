"""Pseudo-labels and the self-training pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dat.cli import main
from dat.config.build import training_data, unlabelled_data
from dat.config.schema import RunConfig
from dat.data import PseudoLabels, load, split_labels
from dat.distributed import World
from dat.jobs.selftrain import pseudo_labels
from tests.cli.test_cli import call
from tests.evaluation.conftest import model, no_launcher, world

__all__ = ["model", "no_launcher", "world"]

SMALL = ("model.width=4", "attack.name=fgsm", "train.epochs=2", "train.batch=96", "comm.threads=1")
FEW = ("data.labels=300", "data.unlabelled=rest")
QUICK = ("evaluate.report=0", "evaluate.attacks=pgd-2", "train.select_steps=2", "data.parts=1")


def test_labels_are_the_models_predictions_for_any_batch_size(
    model: torch.nn.Module, world: World
) -> None:
    data = load("digits").test.without_labels()
    pseudo = pseudo_labels(model, data, world, batch=7)
    with torch.no_grad():
        probabilities = model(data.images).softmax(1)
    assert torch.equal(pseudo.labels, probabilities.argmax(1))
    torch.testing.assert_close(pseudo.confidences, probabilities.amax(1))


def test_the_rest_are_the_images_without_a_label() -> None:
    data = load("digits")
    config = RunConfig.read({"data": {"labels": 300, "unlabelled": "rest", "holdout": 0.2}})
    training = training_data(config, data)
    assert training.unlabelled is not None and training.holdout is not None
    sizes = len(training.labelled), len(training.holdout), len(training.unlabelled)
    assert sizes == (240, 60, 1137) and not training.unlabelled.has_labels
    again = unlabelled_data(config, data)
    assert again is not None and torch.equal(again.tensor(), training.unlabelled.tensor())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("data.unlabelled=rest",), "data.unlabelled = rest: requires data.labels"),
        (("data.pseudo_labels=p.npz",), "data.pseudo_labels: requires data.unlabelled"),
        (FEW, "only trades learns from images without labels"),
        ((*FEW, "data.pseudo_labels=p.npz"), "data.pseudo_labels = p.npz: no such file"),
        (("data.labels=5000",), "data.labels = 5000: must be above 0 and below 1437"),
        (("data.unlabelled=nothing.npz",), "data.unlabelled = nothing.npz: no such file"),
    ],
)
def test_invalid_settings(
    settings: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("train", "digits", *SMALL, *QUICK, *settings, "--out", str(tmp_path / "run"))
    code, _, err = call(capsys, *words)
    assert code == 2
    assert message in err


def test_the_complete_pipeline(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("selftrain", "digits", *SMALL, *QUICK, *FEW, "--base", "train.epochs=8")
    code, out, err = call(capsys, *words, "--out", "both", "--quiet")
    assert code == 0, err
    base, robust = (
        json.loads((tmp_path / "both" / name / "result.json").read_text())
        for name in ("base", "robust")
    )
    assert base["method"] == "Standard" and base["epochs"] == 8
    assert robust["method"] == "Fast AT" and robust["epochs"] == 2
    with np.load(tmp_path / "both" / "pseudo.npz") as file:
        assert len(file["labels"]) == 1137 == len(file["confidences"])
    assert "1137 labels in both/pseudo.npz" in out
    _, rest = split_labels(load("digits").train, 300, seed=0)
    pseudo = PseudoLabels.read(tmp_path / "both" / "pseudo.npz", rest)
    correct = float((pseudo.labels == rest.labels).double().mean())
    assert 100 * correct == pytest.approx(base["ta"], abs=12)  # as accurate as the base model


def test_labelling_with_a_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits", *SMALL, *QUICK, "--quiet", "--json", "--out", "run"])
    assert ended.value.code == 0
    capsys.readouterr()
    code, out, err = call(capsys, "label", "run", "--unlabelled", "digits", "--json", "--quiet")
    assert code == 0, err
    summary = json.loads(out)
    assert summary["images"] == 1437 == sum(summary["classes"])
    assert summary["file"] == "run/pseudo.npz"
    code, _, err = call(capsys, "label", "run")
    assert code == 2 and "--unlabelled is required" in err
    code, _, err = call(capsys, "selftrain", "digits")
    assert code == 2 and "data.unlabelled: specify the images to label" in err
