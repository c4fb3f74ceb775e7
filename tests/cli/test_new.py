"""`dat new`: its folder can be trained, and its recipe is valid in every line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from dat.config.recipes import read
from dat.jobs.starter import create
from tests.cli.test_cli import call


def test_what_is_new_can_be_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code, out, _ = call(capsys, "new", "mine")
    assert code == 0
    assert "mine/recipe.yaml" in out and "dat train recipe.yaml" in out
    monkeypatch.chdir("mine")
    quick = ("train.epochs=1", "train.batch=640", "attack.steps=1", "evaluate.attacks=pgd-1")
    words = ("train", "recipe.yaml", *quick, "evaluate.report=0", "--quiet", "--json")
    code, out, _ = call(capsys, *words)
    assert code == 0, "its network is found"
    monkeypatch.delitem(sys.modules, "net")
    assert json.loads(out)["recipe"] == "recipe.yaml"


def test_every_line_of_its_recipe_is_true(tmp_path: Path) -> None:
    recipe, _ = create(tmp_path / "mine")
    text = recipe.read_text()
    assert "NAME" not in text and "cd mine" in text
    read(str(recipe))
    offered = re.sub(r"^( *)# (?=[a-z_]+: )", r"\1", text, flags=re.MULTILINE)
    assert offered != text
    recipe.write_text(offered)
    config = read(str(recipe))
    assert config.quantizer.bits == 8
    assert config.train.options.averaging.decay == 0.999
    assert config.data.size == 64


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    create(tmp_path / "mine")
    code, _, err = call(capsys, "new", str(tmp_path / "mine"))
    assert code == 2 and "already exists" in err
    code, _, err = call(capsys, "new", str(tmp_path / "no" / "where"))
    assert code == 2 and "does not exist" in err
