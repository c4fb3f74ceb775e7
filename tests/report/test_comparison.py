"""`dat compare`: what a person sees of several runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dat.cli.parser import parse
from tests.report.runs import make_run
from tests.report.runs import result as make_result

AT_8 = make_result(attack="pgd-20, linf 8/255", ra=44.0)
RECIPE = {"model": {"name": "cnn"}, "data": {"name": "digits"}}


def settings(**changes: Any) -> dict[str, Any]:
    return {"recipe": "digits", "threat": {"eps": 0.2}, "seed": 0} | RECIPE | changes


def compare(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    command = ["compare", *words]
    arguments = parse(command)
    assert arguments.run(arguments, command) == 0
    return capsys.readouterr().out


def table(text: str) -> list[dict[str, str]]:
    """The cells of the table by header; columns start where headers of two spaces distance do."""
    header, *rows = text.split("\n\n")[0].splitlines()
    names = [name.strip() for name in header.split("  ") if name.strip()]
    cells = [[cell.strip() for cell in row.split("  ") if cell.strip()] for row in rows]
    return [dict(zip(names, row, strict=True)) for row in cells]


def test_runs_are_named_and_what_differs_is_a_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make_run(tmp_path / "first", config=settings(optimizer={"lr": 0.1}))
    second = make_run(tmp_path / "second", config=settings(optimizer={"lr": 0.2}, seed=1))
    text = compare(capsys, str(first), str(second))
    rows = table(text)
    assert [row["Run"] for row in rows] == ["first", "second"]
    assert [(row["lr"], row["seed"]) for row in rows] == [("0.1", "0"), ("0.2", "1")]
    assert "lr: optimizer.lr" in text
    assert all(row["RA"] == "55.83" for row in rows)


def test_accuracies_under_different_threats_are_different_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = make_run(tmp_path / "one", config=settings())
    other = make_run(tmp_path / "other", config=settings(threat={"eps": 8 / 255}), result=AT_8)
    strong = make_run(
        tmp_path / "strong",
        config=settings(),
        result=make_result(attack="pgd-100, linf 0.2", ra=33.0),
    )
    rows = table(compare(capsys, str(one), str(other)))
    assert [(row["RA 0.2"], row["RA 8/255"]) for row in rows] == [("55.83", "-"), ("-", "44.00")]
    rows = table(compare(capsys, str(one), str(strong)))
    assert [row["RA pgd-20"] for row in rows] == ["55.83", "-"]


def test_an_unfinished_run_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = make_run(tmp_path / "done", config=settings())
    config = settings(train={"epochs": 10})
    going_on = make_run(tmp_path / "going-on", config=config, result=None)
    with (going_on / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 4, "lo')  # being written
    rows = table(compare(capsys, str(done), str(going_on)))
    assert [row["Status"] for row in rows] == ["finished", "epoch 3 of 10"]
    assert rows[1]["TA"] == "-"
    results = json.loads(compare(capsys, str(done), str(going_on), "--json"))
    assert [result["finished"] for result in results] == [True, False]
    assert (results[1]["epoch"], results[1]["epochs"]) == (3, 10)
    assert results[0]["ta"] == 95.56


def test_the_table_fits_and_the_rest_is_below(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = settings(
        optimizer={"name": "lars", "lr": 0.5},
        train={"epochs": 99, "awp": 0.01, "ema": 0.99},
        model={"name": "resnet18", "width": 8},
        threat={"eps": 8 / 255},
        seed=7,
    )
    long = "a-run-with-a-very-long-name-that-nobody-wants-to-read"
    runs = [
        make_run(tmp_path / f"{long}-1", config=settings()),
        make_run(tmp_path / f"{long}-2", config=wide, result=AT_8 | {"aa": 40.0}),
    ]
    text = compare(capsys, *map(str, runs))
    assert max(map(len, text.splitlines())) <= 80
    rows = table(text)
    assert [row["model"] for row in rows] == ["cnn", "resnet18"]
    assert len({row["Run"] for row in rows}) == 2
    flowing = " ".join(text.split())
    assert "train.awp (0, 0.01)" in flowing
    assert "optimizer.momentum" not in flowing  # follows from the optimizer's name
