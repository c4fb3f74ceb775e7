"""Tables fit the terminal."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dat.report.tables import LONGEST_WORD, fit, print_table

words = st.text("abc", min_size=1, max_size=9)
cells = st.lists(words, min_size=1, max_size=4).map(" ".join)
tables = st.integers(1, 6).flatmap(
    lambda rows: st.lists(st.lists(cells, min_size=rows, max_size=rows), min_size=1, max_size=8)
)


@given(tables, st.integers(20, 120))
def test_columns_fit_without_breaking_words(columns: list[list[str]], available: int) -> None:
    widths, gap = fit(columns, available)
    natural = [max(map(len, column)) for column in columns]
    longest = [max(len(word) for cell in column for word in cell.split()) for column in columns]
    assert all(
        low <= width <= high for low, width, high in zip(longest, widths, natural, strict=True)
    )
    total = sum(widths) + gap * (len(columns) - 1)
    assert total <= available or (widths == longest and gap == 1)
    if total < available and gap == 2:
        assert widths == natural  # nothing wraps without need


def test_a_path_may_be_broken() -> None:
    widths, _ = fit([["Dataset", "digits"], ["Location", "/a" * 40]], 60)
    assert LONGEST_WORD <= widths[1] <= 60 - 2 - widths[0]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        return re.sub(r"\x1b\[[0-9;]*m", "", self.getvalue()).splitlines()


@pytest.fixture(params=[60, 80, 100])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setenv("TERM", "xterm")
    return int(request.param)


def test_numbers_and_headers_stay_whole(columns: int) -> None:
    headers = ["Protocol", "Exposed (s)", "Busiest (MB)", "Bottleneck"]
    about = "cores of the busiest of all the workers, and the link between them"
    with redirect_stdout(Terminal()) as terminal:
        print_table(headers, [["chunked", "0.072", "1,234.5", about]], note="some words " * 19)
    lines = terminal.lines()
    assert max(map(len, lines)) <= columns
    shown = {word for line in lines for word in line.split()}
    assert {*" ".join(headers).split(), "chunked", "0.072", "1,234.5", *about.split()} <= shown


def test_optional_columns_are_left_out_in_their_order(columns: int) -> None:
    headers = ["a" * 20, "b" * 20, "c" * 20, "d" * 20]
    with redirect_stdout(Terminal()) as terminal:
        print_table(headers, [list("1234")], optional=[headers[2], headers[1]], note="Note.")
    lines = terminal.lines()
    shown = {60: [0, 3], 80: [0, 1, 3], 100: [0, 1, 2, 3]}[columns]
    assert lines[0].split() == [headers[n] for n in shown]
    assert lines[1].split() == ["1234"[n] for n in shown]
    left_out = [headers[n] for n in (2, 1) if n not in shown]
    note = f"Note. Not shown for lack of width: {', '.join(left_out)} (--json has all)."
    assert " ".join("".join(f"{line} " for line in lines[3:]).split()) == (
        note if left_out else "Note."
    )


def test_a_table_that_just_fits_does_not_wrap(columns: int) -> None:
    cells = ["a" * 20, "b" * (columns - 22)]
    with redirect_stdout(Terminal()) as terminal:
        print_table(["First", "Second"], [cells])
    assert terminal.lines()[1].split() == cells
