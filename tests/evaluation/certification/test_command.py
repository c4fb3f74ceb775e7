"""`dat certify` as a user meets it, and runs that are trained for it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from dat.cli import main
from tests.cli.test_cli import call

NOISY = ("objective.name=smooth", "objective.sigma=0.2", "objective.votes=2", "threat.norm=l2")
QUICK = ("--images", "30", "--n", "2000", "--batch", "256", "--quiet")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small smoothed classifier."""
    out = tmp_path_factory.mktemp("certify") / "run"
    words = ["model.width=4", "attack.steps=2", "train.epochs=6", "train.batch=96", *NOISY]
    words += [
        "evaluate.report=0",
        "evaluate.attacks=pgd-2",
        "train.select_steps=2",
        "comm.threads=1",
    ]
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits", *words, "--quiet", "--json", "--out", str(out)])
    assert ended.value.code == 0
    return out


def certified(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code, out, err = call(capsys, "certify", *words, *QUICK, "--json")
    assert code == 0, err
    return dict(json.loads(out))


def test_a_run_says_what_it_was(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    assert result["method"] == "Smooth-AT (N = 2)" and result["ra"] <= result["ta"]


def test_certify_a_run(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its own sigma; CA falls with the radius; the same with both modes; files for other tools."""
    report = certified(capsys, str(run), "--radii", "0.1,0.05,0.3", "--out", str(tmp_path))
    assert (report["sigma"], report["mode"], report["images"]) == (0.2, "adaptive", 30)
    assert [row["radius"] for row in report["ca"]] == [0.05, 0.1, 0.3]
    accuracies = [row["ca"] for row in report["ca"]]
    assert accuracies == sorted(accuracies, reverse=True) and accuracies[0] > 50
    assert report["samples_per_image"] < 1500
    fixed = certified(capsys, str(run), "--radii", "0.05,0.1", "--fixed", "--out", "none")
    assert fixed["mode"] == "fixed" and fixed["samples_per_image"] == 2100
    assert fixed["acr"] > report["acr"] > 0
    for one, other in zip(report["ca"], fixed["ca"], strict=False):
        assert abs(one["ca"] - other["ca"]) < 7
    (table,) = tmp_path.glob("sigma-0.2-*/certified.tsv")
    with table.open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    share = sum(float(row["radius"]) >= 0.1 for row in rows) / 30
    assert 100 * share == pytest.approx(report["ca"][1]["ca"])


def test_certificates_go_beside_the_run_and_are_found_again(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = certified(capsys, str(run), "--radii", "0.1", "--sigma", "0.3")
    assert list((run / "certificates").glob("sigma-0.3-*/certified.tsv"))
    again = certified(capsys, str(run), "--radii", "0.1", "--sigma", "0.3")
    assert again["ca"] == first["ca"] and again["samples_per_second"] == first["samples_per_second"]


def test_the_table_and_the_picture(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "ca.png"
    code, out, err = call(
        *(capsys, "certify", str(run), "--fixed", *QUICK, "--out", "none", "--plot", str(picture))
    )
    assert code == 0, err
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "CA (%)" in out and "Fixed sampling: 2,100 samples per image" in out


def test_what_cannot_be_shown_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--radii", "0.9", "--out", "none", *QUICK)
    code, _, err = call(capsys, "certify", str(run), *words)
    assert code == 0
    assert "warning: r = 0.9 cannot be certified with sigma 0.2, n = 2000 and alpha 0.001" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--radii", "x"), "--radii: 'x': must be comma-separated numbers"),
        (("--sigma", "-1"), "sigma = -1.0: must be above 0"),
        (("--radii", "0.1", "--alpha", "2"), "alpha = 2.0: must be above 0 and below 0.5"),
        (("--n", "0"), "--n: '0': must be a positive integer"),
        (("--plot", "ca.doc"), "ca.doc: a plot is written to a file that ends in"),
        (("--model", "nets:Net"), "specify a run or --model, not both"),
    ],
)
def test_bad_input(
    words: tuple[str, ...], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, "certify", str(run), *words, "--out", "none")
    assert code == 2
    assert message in err


def test_a_model_of_ones_own_needs_a_sigma(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "certnets.py").write_text(
        "from torch import nn\n\n\ndef net(classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = ("--model", "certnets:net", "--data", "digits")
    code, _, err = call(capsys, "certify", *words, *QUICK)
    assert code == 2 and "--sigma: this model was not trained with noise" in err
    report = certified(capsys, *words, "--sigma", "0.1", "--radii", "0.01")
    assert report["run"] == "net" and (tmp_path / "certificates" / "net").is_dir()
