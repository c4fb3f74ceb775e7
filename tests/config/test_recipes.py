"""The built-in recipes, and recipes in files."""

from __future__ import annotations

import os
import re
from importlib import resources
from pathlib import Path

import pytest
import yaml

from dat.attacks import FGSM, PGD, NoAttack
from dat.config.recipes import header, names, read
from dat.config.recipes.header import Header
from dat.config.schema import RunConfig
from dat.core.settings import SettingError

every_recipe = pytest.mark.parametrize("name", names())


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_names_are_those_of_the_files() -> None:
    folder = Path(str(resources.files("dat.config.recipes")))
    assert names() == sorted(path.stem for path in folder.glob("*.yaml"))
    assert {"digits", "digits-fgsm", "digits-standard"} <= set(names())


@every_recipe
def test_a_recipe_reads_back_from_its_dump(name: str) -> None:
    config = read(name)
    assert RunConfig.read(config.dump()) == config
    assert RunConfig.read(yaml.safe_load(yaml.safe_dump(config.dump()))) == config


@every_recipe
def test_a_recipe_has_a_description_and_a_header(name: str) -> None:
    assert read(name).about
    stated = header(name)
    assert re.search(rf"dat train {name}\b(?!-)", stated.command)
    assert stated.hardware and stated.cost and stated.result
    assert stated.figures or stated.result.startswith("not run")


@every_recipe
def test_a_figure_is_our_own_or_has_a_source(name: str) -> None:
    stated = header(name)
    if stated.is_own:
        assert "n = " in stated.result
    else:
        assert stated.source
        assert not stated.figures or re.search(r"published| in (the|a) ", stated.result)


def test_a_header_is_read() -> None:
    stated = Header.parse(
        "# Command    dat train mine\n#            dat certify runs/mine\n# Hardware   one GPU\n"
        "# Cost       1,000 GPU h, 30 epochs of\n#            two minutes; not run by us\n"
        "# Result     TA 63.75, RA (PGD-10) 38.45, AA 36.04 in the paper; RA 1.0\n"
        "# Source     the paper\nabout: mine\n# Cost       none\n"
    )
    assert stated.command == "dat train mine\ndat certify runs/mine"
    assert stated.cost == "1,000 GPU h, 30 epochs of two minutes; not run by us"
    assert stated.brief_cost == "1,000 GPU h"
    assert stated.figures == {"ta": 63.75, "ra": 38.45, "aa": 36.04}
    assert (stated.source, stated.differs) == ("the paper", "")


def test_a_header_may_have_no_figures() -> None:
    stated = Header.parse("# Cost       unknown\n# Result     not run yet; TA 1.0 elsewhere\n")
    assert (stated.brief_cost, stated.figures, stated.is_own) == ("-", {}, False)
    with pytest.raises(ValueError, match="'# Price      1' belongs to no field"):
        Header.parse("# Price      1\n")


@every_recipe
def test_every_row_of_a_recipe_has_a_help_text(name: str) -> None:
    assert [row.path for row in read(name).rows() if not row.help.strip()] == []


def test_digits_recipes_differ_in_their_attack() -> None:
    assert isinstance(read("digits").attack, PGD)
    assert read("digits-fgsm").attack == FGSM()
    assert read("digits-standard").attack == NoAttack()
    assert read("digits-fgsm").optimizer == read("digits").optimizer


def test_edits_override_a_recipe() -> None:
    config = read("digits", {"attack": {"steps": "3"}, "seed": 4})
    assert (config.attack, config.seed) == (PGD(steps=3), 4)
    assert config.threat == read("digits").threat
    assert read("digits", {"attack": "fgsm"}).attack == FGSM()


def test_a_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, "my.yaml", "seed: 3\nattack: fgsm\nthreat: {eps: 8/255}\n")
    config = read(path)
    assert (config.seed, config.attack, config.threat.eps) == (3, FGSM(), 8 / 255)
    assert read(write(tmp_path, "my.yml", "seed: 3")).seed == 3


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    assert read(write(tmp_path, "my.yaml", "# nothing\n")) == RunConfig()


def test_a_file_may_build_on_a_built_in_recipe(tmp_path: Path) -> None:
    config = read(write(tmp_path, "my.yaml", "base: digits\nattack: {steps: 3}\n"))
    assert config.attack == PGD(steps=3)
    assert config.model == read("digits").model


def test_a_file_may_build_on_a_file_in_its_folder(tmp_path: Path) -> None:
    write(tmp_path, "deep/base.yaml", "seed: 3\nattack: {name: pgd, steps: 4}\n")
    assert read(write(tmp_path, "deep/my.yaml", "base: base.yaml\nattack: fgsm\n")).seed == 3
    far = write(tmp_path, "far.yaml", f"base: {tmp_path}/deep/base.yaml\n")
    assert read(far).attack == PGD(steps=4)


def test_a_chain_of_files_is_followed(tmp_path: Path) -> None:
    write(tmp_path, "deep/first.yaml", "seed: 3\n")
    write(tmp_path, "deep/second.yaml", "base: first.yaml\n")
    assert read(write(tmp_path, "deep/third.yaml", "base: second.yaml\n")).seed == 3


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"my.yaml": "base: my.yaml"}, "is its own base"),
        ({"my.yaml": "base: a.yaml", "a.yaml": "base: my.yaml"}, "is its own base: .*a.yaml"),
        ({"my.yaml": "base: digit"}, "unknown recipe 'digit': did you mean digits?"),
        ({"my.yaml": "base: nowhere.yaml"}, "recipe nowhere.yaml: no such file"),
        ({"my.yaml": "base: [digits]"}, "unknown recipe"),
        ({"my.yaml": "- a\n- b"}, "my.yaml: must be a group of settings"),
        ({"my.yaml": "just text"}, "my.yaml: must be a group of settings"),
        ({"my.yaml": "seed: [1"}, "my.yaml is not valid YAML"),
        ({"my.yaml": "seed: 1\n\tattack: x"}, "my.yaml is not valid YAML"),
        ({"my.yaml": "seed: one"}, "seed = 'one': must be a whole number"),
        ({"my.yaml": "atack: pgd"}, "unknown setting atack: did you mean attack?"),
    ],
)
def test_wrong_files_are_refused(
    files: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        write(tmp_path, name, text)
    with pytest.raises(SettingError, match=message) as error:
        read("my.yaml")
    assert "\n" not in str(error.value)


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_bytes(b"\xff\xfe\x00seed")
    with pytest.raises(SettingError, match=r"my\.yaml is not valid YAML"):
        read(str(path))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("digts", r"unknown recipe 'digts': did you mean digits\? .*`dat recipes` lists all"),
        ("zzz", r"unknown recipe 'zzz' \(`dat recipes` lists all; the name of a file ends in"),
        ("nowhere/my.yaml", "recipe nowhere/my.yaml: no such file"),
        ("../digits", "unknown recipe"),
        ("", "unknown recipe"),
    ],
)
def test_unknown_recipes_are_refused(recipe: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        read(recipe)


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.mkdir [{}]", "!!python/object/new:os.mkdir [[{}]]"]
)
def test_a_python_tag_is_refused_and_not_run(tag: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    text = "about: " + tag.format(trace)
    if "apply" in tag:
        yaml.unsafe_load(text)
        os.rmdir(trace)  # the tag is effective
    with pytest.raises(SettingError, match=r"my\.yaml is not valid YAML: could not determine"):
        read(write(tmp_path, "my.yaml", text))
    assert not trace.exists()


@pytest.mark.parametrize(
    "text", ["about: 2020-13-45", "seed: " + 5000 * "1", "about: " + 3000 * "["]
)
def test_errors_about_extreme_values_name_the_file(text: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"my\.yaml"):
        read(write(tmp_path, "my.yaml", text))
