"""Error analysis: its counts are consistent, and its images are within the threat model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from dat.config.schema import RunConfig
from dat.data import ImageData
from dat.distributed import World
from dat.evaluation import assess
from dat.jobs.error_analysis import BROKEN_SHOWN, ROBUST_SHOWN, ErrorAnalysis, analyze_errors

CLASSES = 3
EPS = 0.1


@pytest.fixture(scope="module")
def data() -> ImageData:
    """Three classes; the label is the third of the image that is bright."""
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(90) % CLASSES
    images = torch.rand(90, 1, 6, 6, generator=random) * 0.5
    for row, label in enumerate(labels):
        images[row, :, 2 * label : 2 * label + 2] += 0.2
    return ImageData.of(images, labels, names=("top", "middle", "foot"))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    linear = nn.Linear(36, CLASSES)
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.zero_()
        for label in range(CLASSES):
            linear.weight[label, 12 * label : 12 * label + 12] = 1.0
    return nn.Sequential(nn.Flatten(), linear)


def config(**settings: object) -> RunConfig:
    values = {"threat": {"eps": EPS}, "evaluate": {"attacks": "pgd-5"}} | settings
    return RunConfig.read(values)


@pytest.fixture(scope="module")
def analysis(model: nn.Module, data: ImageData) -> ErrorAnalysis:
    with World.join(device="cpu", threads=1) as world:
        result = analyze_errors(config(), model, data, world, images=60)
    assert result is not None
    return result


def test_counts_match_the_accuracies(
    analysis: ErrorAnalysis, model: nn.Module, data: ImageData
) -> None:
    figures = analysis.figures
    classes = figures["classes"]
    assert [row["images"] for row in classes] == [20, 20, 20]
    assert sum(row["right"] for row in classes) == pytest.approx(0.6 * figures["ta"])
    assert sum(row["standing"] for row in classes) == pytest.approx(0.6 * figures["ra"])
    assert 0 < figures["ra"] < figures["ta"]
    with World.join(device="cpu", threads=1) as world:
        subset = data.take(torch.arange(60))
        again = assess(model, subset, ["pgd-5"], threat=config().threat, world=world, check=False)
    assert (figures["ta"], figures["ra"]) == (again.ta, again.ra("pgd-5"))


def test_confusions_cover_every_image(analysis: ErrorAnalysis) -> None:
    figures = analysis.figures
    for label, row in enumerate(figures["classes"]):
        predictions = {
            prediction: count for true, prediction, count in figures["confusions"] if true == label
        }
        assert sum(predictions.values()) == row["images"]
        assert predictions.get(label, 0) == row["standing"]  # robust images are correct


def test_the_curve_starts_at_the_clean_accuracy(analysis: ErrorAnalysis) -> None:
    over_eps, over_steps = analysis.figures["curves"]
    assert over_eps["ra"][0] == pytest.approx(analysis.figures["ta"])
    assert list(over_eps["ra"]) == sorted(over_eps["ra"], reverse=True)
    assert over_steps["over"] == "steps"


def test_the_gallery_shows_successful_and_failed_attacks(analysis: ErrorAnalysis) -> None:
    broken = [image for image in analysis.gallery if image.notes["fell"]]
    robust = [image for image in analysis.gallery if not image.notes["fell"]]
    assert (len(broken), len(robust)) == (BROKEN_SHOWN, ROBUST_SHOWN)
    for image in broken:
        notes = image.notes
        assert notes["clean"]["class"] == notes["label"] != notes["adversarial"]["class"]
    for image in robust:
        assert image.notes["adversarial"]["class"] == image.notes["label"]
    for image in analysis.gallery:
        change = (image.adversarial - image.clean).abs().max()
        assert 0 < float(change) <= EPS + 1e-6
        assert image.notes["distance"] == pytest.approx(float(change))
    assert {image.notes["label"] for image in broken} == set(range(CLASSES))


def test_the_analysis_is_written_to_the_run(analysis: ErrorAnalysis, tmp_path: Path) -> None:
    for _ in range(2):  # the second replaces the first
        analysis.write(tmp_path)
    values = json.loads((tmp_path / "examination.json").read_text())
    assert len(values["gallery"]) == BROKEN_SHOWN + ROBUST_SHOWN
    assert values["names"] == ["top", "middle", "foot"]
    files = sorted((tmp_path / "gallery").iterdir())
    assert len(files) == 3 * (BROKEN_SHOWN + ROBUST_SHOWN)
    clean = np.asarray(Image.open(tmp_path / "gallery" / "00-clean.png")) / 255
    assert np.abs(clean - analysis.gallery[0].clean[0].numpy()).max() <= 0.5 / 255 + 1e-6
    change = np.asarray(Image.open(tmp_path / "gallery" / "00-change.png"))
    assert change.min() == 0 or change.max() == 255  # the largest change is black or white


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_with_eps_zero_no_attack_succeeds(model: nn.Module, data: ImageData, norm: str) -> None:
    eps_zero = config(threat={"norm": norm, "eps": 0.0}, evaluate={"attacks": "autoattack"})
    with World.join(device="cpu", threads=1) as world:
        analysis = analyze_errors(eps_zero, model, replace(data, names=()), world, images=30)
    assert analysis is not None
    assert analysis.figures["attack"] == "pgd-20"  # AutoAttack is a suite, and expensive
    assert analysis.figures["ta"] == analysis.figures["ra"]
    assert analysis.figures["names"] == ["0", "1", "2"]
    assert not any(image.notes["fell"] for image in analysis.gallery)
