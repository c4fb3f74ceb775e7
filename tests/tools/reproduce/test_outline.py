"""What `dat reproduce --dry-run` shows before anything is run."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dat.cli import main
from dat.cli.parser import parse
from dat.tools.reproduce import Study, StudyPlan, names, parse_study, read_study
from dat.tools.reproduce.launching import layout
from dat.tools.reproduce.outline import describe_cost, outline, outline_rows, varied_settings


def make_study(**values: Any) -> Study:
    rows = [
        {"name": "sgd", "settings": {"optimizer": {"name": "sgd"}}},
        {"name": "lamb", "workers": 2, "tune": {"optimizer.lr": [0.1, 0.2]}},
    ]
    base = {"optimizer": {"name": "lamb"}, "train": {"epochs": 2, "batch": 100}}
    base["data"] = {"name": "digits", "holdout": 0.1}
    return parse_study(
        "small", "desk", {"title": "", "about": "", "base": base, "rows": rows} | values
    )


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", *words])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_only_what_differs_is_shown() -> None:
    study = make_study()
    assert varied_settings(study) == [
        {"workers": 1, "optimizer.name": "sgd"},
        {"workers": 2, "optimizer.name": "lamb"},
    ]
    assert outline_rows(outline(StudyPlan(study, Path("none"), 3))["rows"]) == [
        ["sgd", "3", "24", "workers=1 optimizer.name=sgd"],
        ["lamb", "4", "24", "workers=2 optimizer.name=lamb\noptimizer.lr tuned over 0.1, 0.2"],
    ]


def test_a_cost_that_nobody_knows_is_not_invented(tmp_path: Path) -> None:
    plan = StudyPlan(make_study(), tmp_path, 3)
    cost = outline(plan)["cost"]
    assert cost == {
        "runs": 7, "steps": 168, "stated": None, "finished": 0, "seconds_per_run": None
    }  # fmt: skip
    assert describe_cost(cost, 3) == [
        "7 training runs with 3 seeds, 168 steps in total.",
        "Cost: no estimate; the study states none, and no run is finished.",
    ]


def test_finished_runs_give_an_estimate(tmp_path: Path) -> None:
    plan = StudyPlan(make_study(), tmp_path, 3)
    folder = plan.known_runs()[0].folder
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps({"train_seconds": 60.0}))
    text = " ".join(" ".join(describe_cost(outline(plan)["cost"], 3)).split())
    assert "1 run finished, 60 s of training each on average" in text
    assert "the other 6 take 6 min of training" in text


def test_unknown_steps_are_left_out(tmp_path: Path) -> None:
    base = {"data": {"name": "digits", "labels": 100, "unlabelled": "rest"}}
    rows = [{"name": "one"}]
    cost = outline(StudyPlan(make_study(base=base, rows=rows), tmp_path, 1))["cost"]
    assert cost["steps"] is None
    assert describe_cost(cost, 1)[0] == "1 training run with 1 seed."


@pytest.mark.parametrize(
    ("scale", "name"), [(scale, name) for scale in ("desk", "paper") for name in names(scale)]
)
def test_every_study_fits_into_100_columns(scale: str, name: str, tmp_path: Path) -> None:
    study = read_study(name, scale)
    about = outline(StudyPlan(study, tmp_path / "none", study.seeds))
    rows = outline_rows(about["rows"])
    columns = list(zip(*rows, strict=True))
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
    assert widths[0] + 4 + 13 + widths[3] + 6 <= 100
    assert about["cost"]["stated"]
    assert all(
        len(line) <= 80 for text in describe_cost(about["cost"], 3) for line in text.split("\n")
    )


def test_the_papers_scale_is_printed_as_commands_to_paste(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = run(capsys, "table3", "--scale", "paper", "--seeds", "1")
    out += run(capsys, "figure4", "--scale", "paper", "--dry-run", "--seeds", "1")
    long = [line for line in out.splitlines() if len(line) > 100 and "tiny-images" not in line]
    assert not long
    shell = out[out.index("# torchrun") :].replace("\\\n", "")
    lines = [shlex.split(line) for line in shell.splitlines() if " -m dat " in line]
    started = [words[words.index("dat") + 1 :] for words in lines]
    assert {words[0] for words in started} == {"train", "label", "finetune"}
    for words in started:
        parse(words)
    assert "--workers" not in shell
    for line in shell.splitlines():
        if line.startswith("dat launch slurm"):
            parse(shlex.split(line.removesuffix(" &&"))[1:])
    pasted = out[out.index("# torchrun") : out.index("\nFigure 4")]
    subprocess.run(["bash", "-n"], input=pasted, text=True, check=True)


def test_the_desk_scale_lists_commands_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("cu", "--dry-run", "--seeds", "1", "--runs", str(tmp_path), "--json")
    about = json.loads(run(capsys, *words))
    assert about["rows"][0]["settings"]["optimizer.c_u"] == 0.5
    assert len(about["commands"]) == 8 == len(list(tmp_path.glob("*.yaml")))


def test_workers_are_laid_out_on_nodes_of_up_to_six() -> None:
    assert [layout(workers) for workers in (1, 6, 12, 36, 7, 20)] == [
        (1, 1), (1, 6), (2, 6), (6, 6), (7, 1), (4, 5)
    ]  # fmt: skip
