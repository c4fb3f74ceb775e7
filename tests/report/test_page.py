"""The report: it says what a run's files say, whoever named them, and survives what is missing."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dat.report.page import write_page, write_plots
from dat.report.page.gather import gather
from dat.report.page.svg import Axis, decades, line_chart, nice, stacked_chart
from dat.report.page.tables import confusions, settings
from dat.report.plots import Chart, Stack
from tests.report.runs import EPOCHS, config, make_run, result

VOID = {"meta", "link", "img", "line", "rect", "circle", "polyline"}


class Read(HTMLParser):
    """A page's text, its elements and whether they are closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID or (tag == "rect" or tag == "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data.strip())

    def values(self, key: str) -> list[str]:
        return [
            value for _, attributes in self.elements if (value := attributes.get(key)) is not None
        ]


def page_of(tmp_path: Path, *runs: Path) -> Read:
    out = tmp_path / "page.html"
    write_page(runs, out)
    return Read(out.read_text())


def test_it_says_what_the_files_say(tmp_path: Path) -> None:
    page = page_of(tmp_path, make_run(tmp_path / "mine"))
    text = page.text
    for figure in ("95.6 %", "55.8 %", "2.27 MB", "12.5 %", "chunked", "8 (bucket)"):
        assert figure in text
    assert "cat (90 %)" in text and "dog (60 %)" in text
    assert text.count("robust") == 1 and text.count("broken") == 1
    assert not any("Warnings" in entry for entry in text)
    charts = [entry for tag, entry in page.elements if tag == "figure"]
    names = ["loss", "accuracy", "lr", "time", "trust", "ra-over-eps", "ra-over-steps"]
    assert [entry["id"] for entry in charts] == names


def test_it_loads_nothing(tmp_path: Path) -> None:
    page = page_of(tmp_path, make_run(tmp_path / "mine"))
    addresses = page.values("src") + page.values("href")
    assert all(value.startswith(("data:", "#")) for value in addresses)
    assert not any(tag in ("script", "iframe") for tag, _ in page.elements)
    assert any("default-src 'none'" in value for value in page.values("content"))


def test_links_lead_somewhere_and_names_are_unique(tmp_path: Path) -> None:
    page = page_of(tmp_path, make_run(tmp_path / "a"), make_run(tmp_path / "b"))
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in page.values("href") if link.startswith("#")} <= set(ids)
    assert set(page.values("aria-labelledby")) <= set(ids)


def test_pictures_and_charts_can_be_heard(tmp_path: Path) -> None:
    page = page_of(tmp_path, make_run(tmp_path / "mine"))
    assert all(attributes.get("alt") for tag, attributes in page.elements if tag == "img")
    shown = [
        attributes
        for tag, attributes in page.elements
        if tag == "svg" and "aria-hidden" not in attributes
    ]
    assert len(shown) == 7 and all(attributes.get("role") == "img" for attributes in shown)


def test_names_of_others_are_text(tmp_path: Path) -> None:
    odd = ("<script>alert(1)</script>", '"><img src=x>')
    page = page_of(tmp_path, make_run(tmp_path / "<b>run", names=odd))
    assert odd[0] in page.text
    assert not any(tag in ("script", "b") for tag, _ in page.elements)
    assert all(source.startswith("data:") for source in page.values("src"))


def test_several_runs_side_by_side(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a" / "run")
    second = make_run(
        tmp_path / "b" / "run",
        config=config(attack={"name": "fgsm"}, seed=1),
        result=result(ra=40.04),
    )
    page = page_of(tmp_path, first, second)
    assert {"a/run", "b/run", "55.8 %", "40.0 %"} <= set(page.text)
    table = settings(gather([first, second]))
    differing = {row[0] for number, row in enumerate(table.rows) if number in table.picked}
    assert differing == {"attack.name", "attack.steps", "seed"}
    assert sorted(table.picked) == [0, 1, 2]
    assert page.values("class").count("picked") == 3


def test_a_run_that_goes_on_is_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine", result=None, examination=None)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 4, "lo')  # being written
    page = page_of(tmp_path, run)
    assert f"{70 + EPOCHS:.1f} %" in page.text
    assert any("not finished" in text for text in page.text)


def test_what_is_doubtful_is_said_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine", result=result(warnings=["odd thing"]))
    (run / "warnings.txt").write_text("odd thing\ncollapsed\n")
    page = page_of(tmp_path, run)
    assert page.text.count("odd thing") == 1 and "collapsed" in page.text
    assert "Warnings" in page.text


def measured(**values: Any) -> str:
    return json.dumps({"weights": "best", "warnings": []} | values) + "\n"


def test_what_was_measured_later_joins_in(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine")
    aa = {"kind": "evaluate", "images": 77}
    certified = {"kind": "certify", "images": 50, "ca": [{"radius": 0.1, "ca": 81.0}]}
    swept = {"over": "eps", "values": [0.0, 0.5], "ra": [99.0, 1.25]}
    (run / "measured.jsonl").write_text(
        measured(**aa, suites={"autoattack": {"ra": 11.0}})
        + measured(**aa, suites={"autoattack": {"ra": 44.44}})
        + measured(**aa, suites={"autoattack": {"ra": 12.0}}, weights="last")
        + measured(**certified)
        + measured(kind="sweep", curves=[swept])
    )
    text = page_of(tmp_path, run).text
    assert {"44.4 %", "81.0 %", "1.25"} <= set(text)
    assert "11.0 %" not in text and "12.0 %" not in text
    assert any("77 test images" in line for line in text)


def test_many_classes_become_a_list(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine", names=tuple(f"class {number}" for number in range(100)))
    page = page_of(tmp_path, run)
    assert "Most frequent mistakes under attack" in page.text
    assert confusions(gather([run])[0]) is not None


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.yaml", "a: [", "config.yaml: not a config"),
        ("result.json", "{", "result.json: not valid JSON"),
        ("metrics.jsonl", "{\n{}\n", "line 1 is not JSON"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, file: str, text: str, message: str) -> None:
    run = make_run(tmp_path / "mine")
    (run / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        gather([run])


def test_folders_are_checked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine")
    with pytest.raises(ValueError, match="not the folder of a run"):
        gather([tmp_path])
    with pytest.raises(ValueError, match="given twice"):
        gather([run, tmp_path / "." / "mine"])


def test_the_charts_as_files(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine")
    written = write_plots([run], tmp_path / "plots")
    assert len(written) == 14 and all(path.stat().st_size > 1000 for path in written)
    assert {path.suffix for path in written} == {".png", ".svg"}


FINITE = st.floats(-1e6, 1e6)


@given(FINITE, FINITE)
def test_ticks_are_few_and_inside(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    ticks = nice(low, high)
    margin = 1e-6 * max(abs(low), abs(high), 1e-9)
    assert 1 <= len(ticks) <= 7
    assert ticks == sorted(set(ticks))
    assert all(low - margin <= tick <= high + margin for tick in ticks)


@given(st.floats(1e-6, 1e6), st.floats(1.0, 1e6))
def test_logarithmic_ticks_are_few_and_inside(low: float, times: float) -> None:
    ticks = decades(low, low * times)
    assert 1 <= len(ticks) <= 7
    assert all(low * 0.999 <= tick <= low * times * 1.001 for tick in ticks)


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.booleans())
def test_an_axis_keeps_the_order(one: float, other: float, log: bool) -> None:
    axis = Axis(0.1, 10, 0, 100, log)
    assert (axis(one) <= axis(other)) == (round(axis(one), 2) <= round(axis(other), 2))
    if one <= other:
        assert axis(one) <= axis(other)
    assert axis(0.1) == 0 and axis(10) == 100
    assert not log or math.isclose(axis(1), 50)


def test_axes_say_what_they_show() -> None:
    line = line_chart(Chart({"a": ([1, 2], [3, 4])}, "epoch", "RA (%)"), "ra")
    bars = stacked_chart(Stack([1, 2], {"attack": [3, 4]}, "epoch", "seconds"), "time")
    assert ">RA (%)</text>" in line and ">seconds</text>" in bars
    assert ">epoch</text>" in line and ">epoch</text>" in bars
