"""Evaluations and sweeps as people see them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dat.evaluation import Curve
from dat.report import show_evaluation, show_sweep, warn

COST = {"seconds": 1.25, "forwards": 1234567, "backwards": 1000}
FOUND: dict[str, Any] = {
    "run": "runs/[/oops] [bold]",
    "weights": "best",
    "images": 200,
    "ta": 90.0,
    "attack": "pgd-20, l2 0.5",
    "ra": 50.0,
    "aa": 45.0,
    "suites": {
        "clean": {"ra": 90.0, "fell": {}, "costs": {}},
        "pgd-20": {"ra": 50.0, "fell": {"pgd-20": 80}, "costs": {"pgd-20": COST}},
        "autoattack": {
            "ra": 45.0,
            "fell": {"apgd-ce": 78, "apgd-t": 12, "square": 0},
            "costs": {"apgd-ce": COST, "apgd-t": COST, "square": COST | {"backwards": 0}},
        },
    },
    "warnings": ["the [/gradients] mislead", "twice"],
    "network": "3 batch norms folded",
}
CURVES = {
    "runs/a": [Curve("eps", (0.0, 8 / 255), (90.0, 41.5)), Curve("steps", (1, 10), (60.0, 50.0))],
    "runs/[b]": [Curve("eps", (0.0, 8 / 255), (95.0, 0.0)), Curve("steps", (1, 10), (9.0, 0.0))],
}


def lines(capsys: pytest.CaptureFixture[str]) -> tuple[list[str], list[str]]:
    """Standard output and error, spaces squeezed, empty lines left out."""
    captured = capsys.readouterr()
    return tuple(  # type: ignore[return-value]
        [" ".join(line.split()) for line in text.splitlines() if line] for text in captured
    )


def test_warnings_are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    warn(["one", "two [b]"])
    assert lines(capsys) == ([], ["warning: one", "warning: two [b]"])
    warn([])
    assert lines(capsys) == ([], [])


def test_an_evaluation_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    show_evaluation(FOUND, as_json=False)
    out, err = lines(capsys)
    assert out[:3] == [
        "Run Weights TA (%) pgd-20 (%) autoattack (%)",
        "runs/[/oops] [bold] best 90.00 50.00 45.00",
        "TA: clean accuracy; RA: robust accuracy (correct on the clean image and under the attack "
        "that heads the column). 200 test images, l2 0.5. Network under attack: 3 batch norms "
        "folded.",
    ]
    assert out[3:8] == [
        "autoattack Broken RA (%) Forward passes Backward passes s",
        "clean 90.00",
        "apgd-ce 78 51.00 1,234,567 1,000 1.2",
        "apgd-t 12 45.00 1,234,567 1,000 1.2",
        "square 0 45.00 1,234,567 0 1.2",
    ]
    assert out[8].startswith("Broken: images broken by this attack and by none before it.")
    assert len(out) == 9  # an attack by itself needs no table of its own
    assert err == ["warning: the [/gradients] mislead", "warning: twice"]


def test_an_evaluation_of_clean_images_alone(capsys: pytest.CaptureFixture[str]) -> None:
    report = FOUND | {
        "attack": "linf 0.1",
        "ra": None,
        "suites": {"clean": FOUND["suites"]["clean"]},
        "warnings": [],
    }
    show_evaluation(report, as_json=False)
    out, err = lines(capsys)
    assert out[0] == "Run Weights TA (%)"
    assert out[2].endswith("images, linf 0.1. Network under attack: 3 batch norms folded.")
    assert (len(out), err) == (3, [])


def test_an_evaluation_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output is the result and nothing else."""
    show_evaluation(FOUND, as_json=True)
    captured = capsys.readouterr()
    assert json.loads(captured.out) == FOUND
    assert len(captured.err.splitlines()) == 2


def test_a_sweep_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    show_sweep(CURVES, ["odd"], attack="cw-20", as_json=False, plot=None)
    out, err = lines(capsys)
    assert out == [
        "eps runs/a (%) runs/[b] (%)",
        "0 90.00 95.00",
        "8/255 41.50 0.00",
        "RA: robust accuracy (cw-20, over eps).",
        "steps runs/a (%) runs/[b] (%)",
        "1 60.00 9.00",
        "10 50.00 0.00",
        "RA: robust accuracy (cw-20, over steps).",
    ]
    assert err == ["warning: odd"]


def test_a_sweep_as_json_and_as_a_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "sweep.svg"
    show_sweep(CURVES, [], attack="pgd-20", as_json=True, plot=picture)
    printed = json.loads(capsys.readouterr().out)
    assert printed["attack"] == "pgd-20"
    assert printed["warnings"] == []
    assert [(curve["run"], curve["over"]) for curve in printed["curves"]] == [
        (run, over) for run in CURVES for over in ("eps", "steps")
    ]
    assert printed["curves"][0]["values"] == [0.0, 8 / 255]
    assert printed["curves"][0]["ra"] == [90.0, 41.5]
    drawn = picture.read_text()
    for text in ("runs/a", "runs/[b]", "RA (%), pgd-20", "eps", "steps"):
        assert f"<!-- {text} -->" in drawn


def test_a_sweep_over_one_thing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one = {run: curves[1:] for run, curves in CURVES.items()}
    show_sweep(one, [], attack="pgd-20", as_json=False, plot=tmp_path / "one.png")
    assert lines(capsys)[0][0] == "steps runs/a (%) runs/[b] (%)"
    assert (tmp_path / "one.png").stat().st_size > 1000
