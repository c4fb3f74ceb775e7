"""A closer look at a model: its counts fit together, and its pictures are within the ball."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from dat.comm import World
from dat.config import RunConfig
from dat.data import ImageData
from dat.evaluation import assess
from dat.examination import FALLEN, STANDING, Examined, examine

CLASSES = 3
EPS = 0.1


@pytest.fixture(scope="module")
def data() -> ImageData:
    """Three classes, told apart by which third of the pixels is bright."""
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
def examined(model: nn.Module, data: ImageData) -> Examined:
    with World.join(device="cpu", threads=1) as world:
        found = examine(config(), model, data, world, images=60)
    assert found is not None
    return found


def test_its_counts_fit_the_accuracies(
    examined: Examined, model: nn.Module, data: ImageData
) -> None:
    found = examined.figures
    classes = found["classes"]
    assert [it["images"] for it in classes] == [20, 20, 20]
    assert sum(it["right"] for it in classes) == pytest.approx(0.6 * found["ta"])
    assert sum(it["standing"] for it in classes) == pytest.approx(0.6 * found["ra"])
    assert 0 < found["ra"] < found["ta"]
    with World.join(device="cpu", threads=1) as world:
        some = data.take(torch.arange(60))
        again = assess(model, some, ["pgd-5"], threat=config().threat, world=world, check=False)
    assert (found["ta"], found["ra"]) == (again.ta, again.ra("pgd-5"))


def test_everyone_is_taken_for_something(examined: Examined) -> None:
    found = examined.figures
    for label, it in enumerate(found["classes"]):
        rows = [(said, count) for true, said, count in found["confusions"] if true == label]
        assert sum(count for _, count in rows) == it["images"]
        assert dict(rows).get(label, 0) == it["standing"]  # who stands is taken for what it is


def test_the_curve_goes_through_the_clean_accuracy(examined: Examined) -> None:
    over_eps, over_steps = examined.figures["curves"]
    assert over_eps["ra"][0] == pytest.approx(examined.figures["ta"])
    assert list(over_eps["ra"]) == sorted(over_eps["ra"], reverse=True)
    assert over_steps["over"] == "steps"


def test_pictures_show_who_fell_and_who_did_not(examined: Examined) -> None:
    fell = [it for it in examined.pictures if it.notes["fell"]]
    stood = [it for it in examined.pictures if not it.notes["fell"]]
    assert (len(fell), len(stood)) == (FALLEN, STANDING)
    for it in fell:
        assert it.notes["clean"]["class"] == it.notes["label"] != it.notes["adversarial"]["class"]
    for it in stood:
        assert it.notes["adversarial"]["class"] == it.notes["label"]
    for it in examined.pictures:
        change = (it.adversarial - it.clean).abs().max()
        assert 0 < float(change) <= EPS + 1e-6
        assert it.notes["distance"] == pytest.approx(float(change))
    assert {it.notes["label"] for it in fell} == set(range(CLASSES))


def test_it_is_written_down(examined: Examined, tmp_path: Path) -> None:
    for _ in range(2):  # the second takes the first one's place
        examined.write(tmp_path)
    told = json.loads((tmp_path / "examination.json").read_text())
    assert len(told["gallery"]) == FALLEN + STANDING
    assert told["names"] == ["top", "middle", "foot"]
    pictures = sorted((tmp_path / "gallery").iterdir())
    assert len(pictures) == 3 * (FALLEN + STANDING)
    clean = np.asarray(Image.open(tmp_path / "gallery" / "00-clean.png")) / 255
    assert np.abs(clean - examined.pictures[0].clean[0].numpy()).max() <= 0.5 / 255 + 1e-6
    change = np.asarray(Image.open(tmp_path / "gallery" / "00-change.png"))
    assert change.min() == 0 or change.max() == 255  # the largest change is black or white


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_nobody_falls_where_nothing_may_change(
    model: nn.Module, data: ImageData, norm: str
) -> None:
    still = config(threat={"norm": norm, "eps": 0.0}, evaluate={"attacks": "autoattack"})
    with World.join(device="cpu", threads=1) as world:
        found = examine(still, model, replace(data, names=()), world, images=30)
    assert found is not None
    assert found.figures["attack"] == "pgd-20"  # AutoAttack is a suite, and dear
    assert found.figures["ta"] == found.figures["ra"]
    assert found.figures["names"] == ["0", "1", "2"]
    assert not any(it.notes["fell"] for it in found.pictures)
