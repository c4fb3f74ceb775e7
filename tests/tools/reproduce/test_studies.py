"""The study files: all can be read, and every row of the paper's scale can be built."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dat.config.build import make_trainer
from dat.config.schema import RunConfig, merge
from dat.core.settings import SettingError
from dat.data import load
from dat.distributed import World
from dat.jobs.train import train
from dat.tools.reproduce import SCALES, Study, StudyRow, names, parse_study, read_study

ALL = [(name, scale) for scale in SCALES for name in names(scale)]


def distinct() -> list[tuple[str, str]]:
    """The distinct rows of the paper's scale; studies share some of them."""
    rows: dict[str, tuple[str, str]] = {}
    for name in names("paper"):
        for row in read_study(name, "paper").rows:
            config = row.config(row.tunings()[-1]).dump()
            rows.setdefault(json.dumps(config, sort_keys=True), (name, row.name))
    return list(rows.values())


PAPER = distinct()


@pytest.mark.parametrize(("name", "scale"), ALL)
def test_a_file_says_what_it_costs_and_gives(name: str, scale: str) -> None:
    file = resources.files("dat.tools.reproduce").joinpath("studies", f"{name}.{scale}.yaml")
    lines = file.read_text().splitlines()[:5]
    labels = [line.split()[1] for line in lines]
    assert labels == ["Command", "Hardware", "Cost", "Result", "n"]
    assert lines[0].split()[2:5] == ["dat", "reproduce", name]
    assert ("--scale paper" in lines[0]) == (scale == "paper")


def test_both_scales_have_the_same_studies() -> None:
    assert set(names("paper")) <= set(names("desk"))
    tables = {"table1", "table2", "table3", "table4", "figure1", "figure2", "figure3", "figure4"}
    assert tables | {"cyclic", "cu", "curves"} == set(names("paper"))


@pytest.mark.parametrize(("name", "scale"), ALL)
def test_rows_are_sound(name: str, scale: str) -> None:
    study = read_study(name, scale)
    for row in study.rows:
        for edits in row.tunings():
            assert row.config(edits).train.batch >= row.workers
    x = study.plot.get("x")
    assert all(x in row.labels for row in study.rows if x and row.shown)


def tiny(row: StudyRow, images: Path) -> dict[str, Any]:
    """The row's settings, scaled down as far as possible."""
    edits: dict[str, Any] = {
        "data": {"name": str(images), "size": None, "resize": None, "holdout": 0.25},
        "model": {"width": 4},
        "train": {"epochs": 1, "batch": 12, "team": 1, "select_steps": 1},
        "evaluate": {"attacks": "pgd-1", "images": 2, "report": 0},
        "schedule": {"milestones": [], "warmup": 0} if _piecewise(row) else {},
        "comm": {"backend": "gloo", "device": "cpu", "threads": 1},
    }
    if "unlabelled" in row.settings["data"]:
        edits["data"] |= {"unlabelled": None, "epoch_by": "labelled"}
    if row.settings["data"].get("augmentation") == "resized-crop":
        edits["data"] |= {"augmentation": "crop-flip"}  # resized-crop needs pictures on disk
    own = {key: row.settings[key] for key in row.settings if key != "finetune"}  # needs weights
    return merge(merge(own, row.tunings()[-1]), edits)


def _piecewise(row: StudyRow) -> bool:
    return bool(row.settings["schedule"]["name"] == "piecewise")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (20, 16, 16, 3), dtype=np.uint8)
    y = np.arange(20) % 4
    file = tmp_path_factory.mktemp("paper") / "images.npz"
    np.savez(file, x_train=x[:16], y_train=y[:16], x_test=x[16:], y_test=y[16:])
    return file


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join(device="cpu", threads=1) as joined:
        yield joined


@pytest.mark.parametrize(("name", "title"), PAPER)
def test_the_papers_scale_can_be_built(name: str, title: str, images: Path, world: World) -> None:
    """Build a trainer for every row, which refuses incompatible settings."""
    config = RunConfig.read(tiny(read_study(name, "paper").row(title), images))
    trainer = make_trainer(config, load(str(images)), world)
    assert type(trainer.attack) is type(config.attack)


def one_of_each() -> list[tuple[str, str]]:
    """One row per network, attack, objective, optimizer, quantizer and protocol."""
    rows: dict[str, tuple[str, str]] = {}
    for name, title in PAPER:
        settings = read_study(name, "paper").row(title).settings
        for group in ("model", "attack", "objective", "optimizer", "quantizer", "protocol"):
            rows.setdefault(f"{group} {settings.get(group, {}).get('name')}", (name, title))
    return sorted(set(rows.values()))


def steps() -> list[Any]:
    """Every row; those with nothing new are slow tests."""
    quick = one_of_each()
    return [pytest.param(*row, marks=[] if row in quick else pytest.mark.slow) for row in PAPER]


@pytest.mark.parametrize(("name", "title"), steps())
def test_the_papers_scale_takes_a_step(name: str, title: str, images: Path, tmp_path: Path) -> None:
    config = RunConfig.read(tiny(read_study(name, "paper").row(title), images))
    result = train(config, name, tmp_path / "run", quiet=True)
    assert result is not None and result["steps"] == 1


def study(**row: Any) -> Study:
    values = {"title": "t", "about": "a", "rows": [{"name": "one"} | row]}
    return parse_study("mine", "desk", values)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"seting": {}}, "unknown 'seting'"),
        ({"command": "play"}, "command must be one of"),
        ({"command": "finetune"}, "finetune needs an origin"),
        ({"command": "finetune", "origin": "two"}, "there is no row two"),
        ({"tune": {"a": [1], "b": [2]}}, "only one setting"),
        ({"settings": {"attack": {"steps": -1}}}, "attack.steps"),
        ({"tune": {"optimizer.lr": [0.1, "x"]}}, "optimizer.lr"),
    ],
)
def test_a_bad_row_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        study(**row)


def test_an_origin_is_not_tuned() -> None:
    rows = [
        {"name": "a", "tune": {"optimizer.lr": [0.1, 0.2]}},
        {"name": "b", "command": "finetune", "origin": "a"},
    ]
    with pytest.raises(SettingError, match="its origin must not be tuned"):
        parse_study("mine", "desk", {"title": "t", "about": "a", "rows": rows})


def test_an_unknown_study_gets_a_suggestion() -> None:
    with pytest.raises(SettingError, match="did you mean table1"):
        read_study("tabel1")
