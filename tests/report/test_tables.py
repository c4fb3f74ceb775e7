"""Tables fit the terminal."""

from __future__ import annotations

import io
import re
import sys

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


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_numbers_and_headers_stay_whole(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    headers = ["Protocol", "Exposed (s)", "Busiest (MB)", "Bottleneck"]
    about = "cores of the busiest of all the workers, and the link between them"
    print_table(headers, [["chunked", "0.072", "1,234.5", about]], note="a note of some words " * 9)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()
    assert max(map(len, lines)) <= columns
    shown = {word for line in lines for word in line.split()}
    assert {*" ".join(headers).split(), "chunked", "0.072", "1,234.5", *about.split()} <= shown
