"""Certification of a classifier whose certified radius is known, and of digits."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from dat.data import ImageData
from dat.distributed import World
from dat.evaluation.certification import (
    ABSTAIN,
    Certified,
    certify,
    largest_radius,
    predict,
    radius,
)
from dat.evaluation.certification.bounds import lower_bound
from tests.evaluation.cases import ProgressRecorder, Stopped
from tests.evaluation.certification.cases import Plane

SIGMA = 0.25
RADII = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
QUICK: dict[str, Any] = {"sigma": SIGMA, "n": 2000, "n0": 50, "batch": 256}


def test_the_fixed_radius_is_a_little_below_the_true_one(
    plane: nn.Module, spread: ImageData, world: World
) -> None:
    """By as much as the exact interval says: hits are binomial with p = Phi(d / sigma)."""
    certified = certify(plane, spread, **QUICK, world=world)
    true = torch.arange(40) * 0.02
    assert (certified.radius <= true + 1e-9).all()
    for distance, reach in zip(true.tolist(), certified.radius.tolist(), strict=True):
        p = stats.norm.cdf(distance / SIGMA)
        likely = stats.binom.ppf((1e-4, 1 - 1e-4), 2000, p)
        low, high = radius(lower_bound(likely, 2000, 0.001), SIGMA)
        assert low - 1e-9 <= reach <= high + 1e-9
    certain = certified.radius > 0
    assert (certified.predicted[certain] == 1).all() and (
        certified.predicted[~certain] == ABSTAIN
    ).all()
    assert certified.samples.eq(2050).all() and certified.abstained == int((~certain).sum()) > 0
    assert certified.acr == pytest.approx(float(certified.radius.mean()))


def test_the_adaptive_mode_agrees_and_takes_a_fraction(
    plane: nn.Module, spread: ImageData, world: World
) -> None:
    settings = QUICK | {"n": 20_000}
    fixed = certify(plane, spread, **settings, world=world)
    certified = certify(plane, spread, radii=RADII, **settings, world=world)
    true = torch.arange(40) * 0.02
    assert (certified.radius <= true + 1e-9).all()
    for r in RADII:
        differ = (certified.radius >= r) != (fixed.radius >= r)
        assert differ.sum() <= 1  # at the image that is nearest to r
        assert certified.accuracy(r) == 100 * float((certified.radius >= r).double().mean())
    assert certified.asked[:, 0].double().mean() < 20_000 / 20
    assert (certified.asked.amax(1) == certified.samples).all()
    assert (certified.asked[:, 1:] >= certified.asked[:, :-1])[certified.radius == 0.5].all()


def test_a_radius_beyond_reach_costs_nothing(
    plane: nn.Module, spread: ImageData, world: World
) -> None:
    r = largest_radius(SIGMA, 2000, 0.001) + 0.01
    certified = certify(plane, spread, radii=(r,), **QUICK, world=world)
    assert certified.accuracy(r) == 0 and certified.samples.max() == 32


def test_a_radius_whose_probability_rounds_to_one_is_given_up(
    plane: nn.Module, spread: ImageData, world: World
) -> None:
    certified = certify(plane, spread, radii=(0.1, 9.0), **QUICK, world=world)
    assert certified.accuracy(9.0) == 0 and certified.accuracy(0.1) > 50


def test_a_wrong_label_is_never_certified(plane: nn.Module, world: World) -> None:
    x = Plane().at(torch.full((4,), 0.7))
    certified = certify(plane, x, torch.tensor([0, 1, 0, 1]), radii=(0.1,), **QUICK, world=world)
    assert certified.predicted.tolist() == [ABSTAIN, 1, ABSTAIN, 1]
    assert certified.correct.tolist() == [False, True, False, True]
    fixed = certify(plane, x, torch.tensor([0, 1, 0, 1]), **QUICK, world=world)
    assert fixed.predicted.tolist() == [1, 1, 1, 1] and fixed.accuracy(0.1) == 50


@pytest.mark.parametrize("radii", [(), (0.05, 0.2)])
def test_nothing_depends_on_the_batch(
    radii: tuple[float, ...], model: nn.Module, data: ImageData, world: World
) -> None:
    subset = data.take(torch.arange(12))
    one, other = (
        certify(model, subset, radii=radii, sigma=0.2, n=500, batch=batch, world=world)
        for batch in (32, 512)
    )
    assert same(one, other)
    assert one.network == "frozen copy" and (one.batch, other.batch) == (32, 512)


@pytest.mark.parametrize("radii", [(), (0.05, 0.2)])
def test_an_interrupted_certification_goes_on(
    radii: tuple[float, ...], model: nn.Module, data: ImageData, world: World, tmp_path: Path
) -> None:
    subset = data.take(torch.arange(80))
    settings: dict[str, Any] = {"radii": radii, "sigma": 0.2, "n": 300, "batch": 256}
    settings["world"] = world
    whole = certify(model, subset, **settings)

    def stop(done: int, total: int) -> None:
        assert total == 80
        if done >= 10:
            raise Stopped

    with pytest.raises(Stopped):
        certify(model, subset, **settings, folder=tmp_path, progress=stop)
    progress = ProgressRecorder()
    again = certify(model, subset, **settings, folder=tmp_path, progress=progress)
    assert same(whole, again)
    assert (
        progress.total[0] < 80 and progress.done[0] == 0 and progress.done[-1] == progress.total[-1]
    )
    progress = ProgressRecorder()
    assert same(whole, certify(model, subset, **settings, folder=tmp_path, progress=progress))
    assert progress.shown == [(0, 0)]
    (table,) = tmp_path.glob("*/certified.tsv")
    assert table.read_text() == again.table()


def test_a_broken_part_is_named(model: nn.Module, data: ImageData, tmp_path: Path) -> None:
    subset = data.take(torch.arange(3))
    settings: dict[str, Any] = {"sigma": 0.2, "n": 100, "batch": 32, "folder": tmp_path}
    certify(model, subset, **settings)
    part = next(tmp_path.glob("*/*.safetensors"))
    part.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=rf"{part.name}: not a file of an evaluation"):
        certify(model, subset, **settings)


def test_the_table_is_what_the_tools_of_cohen_et_al_read(
    plane: nn.Module, spread: ImageData, world: World
) -> None:
    certified = certify(plane, spread, **QUICK, world=world)
    rows = list(csv.DictReader(io.StringIO(certified.table()), delimiter="\t"))
    assert list(rows[0])[:6] == ["idx", "label", "predict", "radius", "correct", "time"]
    assert [int(row["idx"]) for row in rows] == list(range(40))
    for r in (0.0, 0.1, 0.3):
        theirs = sum(bool(int(row["correct"])) and float(row["radius"]) >= r for row in rows) / 40
        assert 100 * theirs == pytest.approx(certified.accuracy(r))
    hours, minutes, seconds = rows[0]["time"].split(":")
    assert int(hours) == 0 and 0 <= int(minutes) < 60 and float(seconds) < 60


def test_predict_answers_or_abstains(plane: nn.Module, world: World) -> None:
    x = Plane().at(torch.tensor([-0.5, -0.1, 0.0, 0.1, 0.5]))
    assert predict(plane, x, sigma=SIGMA, n=1000, batch=256).tolist() == [0, 0, ABSTAIN, 1, 1]
    ten = predict(plane, x, sigma=SIGMA, n=10, batch=256)
    assert ten.tolist()[1:4] == [ABSTAIN] * 3  # ten answers cannot be surer than 1 in 512


def test_predict_abstains_as_the_binomial_test_says(no_launcher: None) -> None:
    """Over many images at the same place, wrong answers are rarer than alpha."""
    distance = 0.02
    x = Plane().at(torch.full((300,), distance))
    answers = predict(Plane(), x, sigma=SIGMA, n=200, alpha=0.05, batch=512)
    wrong, p = int((answers == 0).sum()), stats.norm.cdf(distance / SIGMA)
    assert stats.binom.sf(wrong - 1, 300, 0.05) > 1e-3
    hits = torch.arange(201)
    sure = [k for k in hits.tolist() if stats.binomtest(k, 200, 0.5).pvalue <= 0.05]
    expected = 1 - sum(stats.binom.pmf(k, 200, p) for k in sure)
    abstained = int((answers == ABSTAIN).sum())
    assert stats.binomtest(abstained, 300, expected).pvalue > 1e-3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sigma": 0.0}, "sigma = 0.0: must be above 0"),
        ({"sigma": float("nan")}, "sigma = nan"),
        ({"alpha": 0.7}, "alpha = 0.7: must be above 0 and below 0.5"),
        ({"n": 0}, "n = 0"),
        ({"n0": 0}, "n0 = 0: must be at least 1"),
        ({"batch": 0}, "batch = 0"),
        ({"radii": (0.1, -1.0)}, r"radii = -1.0: must be at least 0"),
        ({"fixed": False}, "radii: the adaptive mode tests given radii; give at least one"),
        ({"precision": "int8"}, "precision = 'int8': must be one of float32"),
    ],
)
def test_bad_input_is_refused(
    settings: dict[str, Any], message: str, plane: nn.Module, spread: ImageData, world: World
) -> None:
    with pytest.raises(ValueError, match=message):
        certify(plane, spread, **(QUICK | settings), world=world)


def test_labels_are_needed_to_ask_whether_they_are_certified(
    plane: nn.Module, world: World
) -> None:
    x = Plane().at(torch.tensor([0.5]))
    with pytest.raises(ValueError, match="y: the adaptive mode tests whether the label"):
        certify(plane, x, radii=(0.1,), **QUICK, world=world)
    certified = certify(plane, x, **QUICK, world=world)
    assert (
        certified.predicted.tolist() == [1]
        and certified.table().splitlines()[1].split("\t")[4] == "0"
    )
    for asked in (
        lambda: certified.acr,
        lambda: certified.accuracy(0.1),
        lambda: certified.correct,
    ):
        with pytest.raises(ValueError, match="the images have no labels"):
            asked()
    bare = ImageData.of(x, torch.tensor([1]), classes=2).without_labels()
    with pytest.raises(ValueError, match="y: the adaptive mode tests whether the label"):
        certify(plane, bare, radii=(0.1,), **QUICK, world=world)


def test_a_radius_that_was_not_asked_for_has_no_accuracy(
    plane: nn.Module, spread: ImageData, world: World
) -> None:
    certified = certify(plane, spread, radii=(0.1,), **QUICK, world=world)
    with pytest.raises(ValueError, match=r"r = 0.2: was not requested; radii = \[0.1\]"):
        certified.accuracy(0.2)


def same(one: Certified, other: Certified) -> bool:
    names = ("labels", "predicted", "radius", "samples", "asked")
    pairs: list[tuple[Tensor, Tensor]] = [
        (getattr(one, name), getattr(other, name)) for name in names
    ]
    return all(torch.equal(a, b) for a, b in pairs)
