"""A small study from start to finish: what is run, what is reused, what is written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pytest
import yaml
from scipy import stats

from dat.cli import main
from dat.config.schema import RunConfig
from dat.tools.reproduce import Study, StudyPlan, parse_study, runs
from dat.tools.reproduce.figures import Estimate, cells, estimate, values_of
from dat.tools.reproduce.job import reproduce
from tests.workers.forked import run_command

VALUES: dict[str, Any] = {
    "title": "A small study",
    "about": "digits",
    "seeds": 2,
    "timed": 3,
    "columns": ["TA", "RA", "AA", "steps", "T"],
    "base": {
        "model": {"width": 2},
        "attack": {"name": "pgd", "steps": 1},
        "optimizer": {"name": "lamb", "lr": 0.02},
        "train": {"epochs": 1, "batch": 640, "select_steps": 1},
        "evaluate": {"attacks": "pgd-1", "images": 40},
        "comm": {"threads": 1},
    },
    "rows": [
        {"name": "tuned", "tune": {"optimizer.lr": [0.001, 0.02]}, "labels": {"batch": 640},
         "paper": {"TA": 50.0}},
        {"name": "larger", "settings": {"train": {"batch": 1280}}, "labels": {"batch": 1280}},
        {"name": "fine-tuned", "command": "finetune", "origin": "larger", "labels": {"batch": 640}},
    ],
    "measure": {"evaluate": {"settings": {"evaluate.attacks": "autoattack"}, "images": 8}},
    "plot": {"kind": "lines", "x": "batch", "y": ["TA", "RA"]},
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands in forked processes, which have torch loaded."""

    def start(words: Sequence[str], log: IO[str]) -> tuple[int, str]:
        done = run_command(words, tmp_path_factory.getbasetemp(), timeout=180)
        log.write(done.stderr)
        return done.returncode, done.stdout

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "start", start)
        yield


def small() -> Study:
    return parse_study("small", "desk", json.loads(json.dumps(VALUES)))


def carried_out(folder: Path) -> dict[str, Any]:
    where = folder / "runs", folder / "results"
    return reproduce(small(), runs=where[0], out=where[1], at_once=2, quiet=True)


@pytest.fixture(scope="module")
def done(forked: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("study")
    return folder, carried_out(folder)


def test_everything_is_written_down(done: tuple[Path, dict[str, Any]]) -> None:
    folder, found = done
    results = folder / "results" / "small"
    assert json.loads((results / "results.json").read_text()) == found
    assert {path.name for path in results.iterdir()} == {
        *("results.json", "table.md", "plot.png", "plot.svg", "recipes"),
    }
    rows = {row["name"]: row for row in found["rows"]}
    assert [run["seed"] for run in rows["tuned"]["runs"]] == [0, 1]
    assert rows["larger"]["runs"][0]["steps"] == 1
    assert 0 <= rows["fine-tuned"]["runs"][1]["aa"] <= 100
    assert found["environment"]["torch"].startswith("2.")
    assert [[epoch["epoch"] for epoch in row["timed"]] for row in found["rows"]] == [[2, 3]] * 3
    assert values_of(rows["larger"], "train_seconds_per_epoch") == [
        epoch["seconds"] for epoch in rows["larger"]["timed"]
    ]
    table = (results / "table.md").read_text()
    assert "C and T are means over 2 epochs" in table
    assert "[50]" in table and "dat reproduce small" in table and "pgd-1, linf" in table


def test_the_rate_with_the_best_held_out_ra_is_taken(done: tuple[Path, dict[str, Any]]) -> None:
    tuned = done[1]["rows"][0]
    best = max(tuned["tried"], key=lambda it: it["holdout_ra"])
    assert tuned["tuned"] == {"optimizer.lr": best["optimizer.lr"]}


def test_what_is_done_is_not_run_again(
    done: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, found = done
    asked: list[list[str]] = []
    really = runs.start

    def start(words: Sequence[str], log: IO[str]) -> tuple[int, str]:
        asked.append(list(words))
        return really(words, log)

    monkeypatch.setattr(runs, "start", start)
    again = carried_out(folder)
    assert not asked
    assert again["rows"] == found["rows"]
    run = StudyPlan(small(), folder / "runs", 2).run(small().row("larger"), 1)
    (run.folder / "result.json").unlink()
    once = carried_out(folder)
    assert [words[0] for words in asked] == ["train", "evaluate"]  # and its measurement
    same = [row["runs"][1]["ra"] for row in once["rows"]]
    assert same == [row["runs"][1]["ra"] for row in found["rows"]]


def test_a_recipe_that_was_written_down_gives_the_run(
    done: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, found = done
    recipe = folder / "results" / "small" / "recipes" / "larger.yaml"
    with pytest.raises(SystemExit) as ended:
        main(["train", str(recipe), "seed=1", "--quiet", "--json", "--out", str(tmp_path / "run")])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["ra"] == found["rows"][1]["runs"][1]["ra"]


def test_a_diverged_run_is_a_result(tmp_path: Path) -> None:
    values = json.loads(json.dumps(VALUES)) | {"measure": {}, "seeds": 1, "timed": 0}
    base = values["base"] | {"optimizer": {"name": "sgd", "lr": 1e30}, "train": {"epochs": 3}}
    values |= {"base": base, "rows": [{"name": "wild", "labels": {"batch": 1}}]}
    study = parse_study("wild", "desk", values)
    found = reproduce(study, runs=tmp_path / "runs", out=tmp_path / "results", quiet=True)
    assert "diverged" in found["rows"][0]["runs"][0]
    assert "1 of 1 diverged" in cells(found["rows"], ["TA"])[0][1]


def test_a_failing_run_says_why(tmp_path: Path) -> None:
    values = json.loads(json.dumps(VALUES)) | {"measure": {}}
    values["rows"] = [{"name": "lost", "settings": {"data": {"name": "nowhere.npz"}}}]
    study = parse_study("lost", "desk", values)
    with pytest.raises(ValueError, match=r"nowhere.npz[\s\S]*the full output is in"):
        reproduce(study, runs=tmp_path / "runs", out=tmp_path / "results", quiet=True)


def test_a_figure_that_some_runs_lack_says_so() -> None:
    runs = [{"ta": 1.0, "aa": 2.0}, {"ta": 3.0}, {"diverged": "so it did"}]
    row = {"name": "a", "shown": True, "paper": {}, "runs": runs}
    assert cells([row], ["AA"]) == [["a", "2.0 (n = 1)"]]
    assert "n =" not in cells([row], ["TA"])[0][1]


def test_the_interval_is_students() -> None:
    values = [1.0, 2.0, 4.0]
    low, high = stats.t.interval(0.95, 2, loc=7 / 3, scale=stats.sem(values))
    found = estimate(values)
    assert found.mean == pytest.approx(7 / 3)
    assert found.spread == pytest.approx((high - low) / 2)
    assert estimate([3.0]) == Estimate(3.0, None)
    assert found.text(1) == "2.3 ± 3.8"


def test_studies_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in (
        ([], "Table 1"),
        (["table1", "--dry-run"], "DAT-PGD w/o LALR"),
        (["table4", "--scale", "paper", "--dry-run"], "--nnodes 6 --nproc-per-node 6"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["reproduce", *words, "--runs", str(tmp_path)])
        assert ended.value.code == 0
        assert expected in capsys.readouterr().out


def test_a_dry_run_gives_commands_with_their_recipes(tmp_path: Path) -> None:
    rows = StudyPlan(small(), tmp_path, 2).listing()
    assert [row["row"] for row in rows] == [*["tuned"] * 2, *["larger"] * 2, *["fine-tuned"] * 2]
    assert not any(row["done"] for row in rows)
    for row in rows:
        words = row["command"].split()
        (recipe,) = (Path(word) for word in words if word.endswith(".yaml"))
        assert RunConfig.read(yaml.safe_load(recipe.read_text())).seed == int(row["seed"])
    larger = rows[2]["command"].split()[-1]
    assert rows[4]["command"].split()[:3] == ["dat", "finetune", larger]
