"""`dat config`: what it shows, and how it fits the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dat.cli import main
from dat.config.recipes import read


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["config", *words])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    code, out, err = call(capsys, "digits", *words, "--json")
    assert code == 0, err
    return [row["path"] for row in json.loads(out)]


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_the_table_fits_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = call(capsys, "digits")
    lines = out.splitlines()
    assert code == 0
    assert max(map(len, lines)) <= columns
    assert not any(line.endswith(" ") for line in lines)
    words = out.split()
    for row in read("digits").rows():
        assert any(line.split()[:1] == [row.path] for line in lines)
        assert set(row.help.split()[1:]) <= set(words)  # nothing is cut


def test_radii_are_shown_in_gray_levels(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(capsys, "digits", "threat.eps=8/255", "threat.eps")
    assert out.splitlines()[1].split()[:2] == ["threat.eps", "8/255"]


def test_groups_and_settings_can_be_selected(capsys: pytest.CaptureFixture[str]) -> None:
    every = shown(capsys)
    assert shown(capsys, "attack") == [path for path in every if path.startswith("attack.")]
    selection = ("attack.steps", "threat", "seed")
    assert shown(capsys, *selection) == ["seed", "threat.norm", "threat.eps", "attack.steps"]
    assert shown(capsys, "attack=fgsm", "attack") == [
        "attack.name",
        "attack.step_ratio",
        "attack.random_start",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("atack", "error: unknown setting atack: did you mean attack?"),
        ("attack.alpha", "error: unknown setting attack.alpha: did you mean attack.step_size?"),
        ("epsilon", "error: unknown setting epsilon: did you mean threat.eps?"),
        ("attack.st", "error: unknown setting attack.st: "),
        (
            "attack=fgsm attack.steps",
            "error: attack.steps belongs to pgd, yopo, apgd, apgd-t, fab; ",
        ),
    ],
)
def test_an_unknown_selection_gets_a_suggestion(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, "digits", *words.split())
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert len(err.splitlines()) == 1


def test_all_mistakes_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "digits", "attack.stepz=3", "seed=-1", "train.batch_size=8")
    assert code == 2
    assert err.splitlines() == [
        "error: digits: 3 mistakes",
        "  unknown setting attack.stepz: did you mean attack.steps?",
        "  unknown setting train.batch_size: did you mean train.batch?",
        "  seed = -1: must be at least 0",
    ]


def test_the_template_of_dat_new_is_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["new", "mine"])
    capsys.readouterr()
    assert call(capsys, "mine/recipe.yaml", "threat")[0] == 0
