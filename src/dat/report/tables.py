"""Aligned tables, and JSON."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from operator import gt
from typing import Any

from rich.console import Console
from rich.text import Text

from dat.core.glossary import legend

RUN_COLUMNS = {
    "method": "Method",
    "workers": "M",
    "batch": "Batch",
    "ta": "TA (%)",
    "ra": "RA (%)",
    "aa": "AA (%)",
    "comm_seconds_per_epoch": "C (s)",
    "train_seconds_per_epoch": "T (s)",
    "mb_per_step": "MB/it",
}

LONGEST_WORD = 24
"""Longer words, such as paths, may be broken."""


def print_json(value: object) -> None:
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def print_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    note: str = "",
    optional: Sequence[str] = (),
) -> None:
    """Print a table: text left-aligned, numbers right-aligned. On a terminal, wide columns wrap at
    words, and a table that is still too wide is shown without the `optional` columns, as far as
    that is necessary."""
    console = _console()
    columns = [[header, *(row[n] for row in rows)] for n, header in enumerate(headers)]
    left_out: list[str] = []
    for header in optional:
        if _width(columns) > console.width:
            columns = [column for column in columns if column[0] != header]
            left_out.append(header)
    if left_out:
        names = ", ".join(left_out)
        note = f"{note} Not shown for lack of width: {names} (--json has all).".strip()
    widths, gap = fit(columns, console.width)
    right = [all(map(_is_number, cells)) for _, *cells in columns]
    for number, row in enumerate(zip(*columns, strict=True)):
        for line in _lines(row, widths, right):
            text = Text((" " * gap).join(line).rstrip(), "" if number else "bold")
            console.print(text, soft_wrap=True)
    if note:
        print_text(f"\n{note}", style="dim")


def print_text(text: str, *, style: str | None = None, stderr: bool = False) -> None:
    """Print sentences; on a terminal they wrap at words."""
    _console(stderr=stderr).print(text, style=style, markup=False)


def _console(*, stderr: bool = False) -> Console:
    console = Console(highlight=False, stderr=stderr)
    if not console.is_terminal:
        console.width = 10_000  # do not wrap in a pipe
    return console


def _lines(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> list[list[str]]:
    """The lines of a row, as high as its highest cell."""
    wrapped = [
        [
            piece
            for line in cell.split("\n")
            for piece in textwrap.wrap(line, width, break_on_hyphens=False) or [""]
        ]
        for cell, width in zip(cells, widths, strict=True)
    ]
    return [
        [
            piece.rjust(width) if is_right else piece.ljust(width)
            for piece, width, is_right in zip(pieces, widths, right, strict=True)
        ]
        for pieces in zip_longest(*wrapped, fillvalue="")
    ]


def _width(columns: Sequence[Sequence[str]]) -> int:
    """The least width of a table whose words are whole."""
    widths, gap = fit(columns, 0)
    return sum(widths) + gap * (len(columns) - 1)


def fit(columns: Sequence[Sequence[str]], available: int) -> tuple[list[int], int]:
    """The widths of columns, and the gap between them, that fit in the available width without
    breaking a word, if that is possible."""
    lines = ["\n".join(cells).split("\n") for cells in columns]
    widths = [max(1, *map(len, column)) for column in lines]
    words = [max(map(len, " ".join(cells).split()), default=0) for cells in columns]
    shortest = [max(min(word, LONGEST_WORD), 1) for word in words]
    gap = 2 if sum(shortest) + 2 * (len(columns) - 1) <= available else 1
    excess = sum(widths) + gap * (len(columns) - 1) - available
    while excess > 0 and any(map(gt, widths, shortest)):
        reducible = [n for n, width in enumerate(widths) if width > shortest[n]]
        widest = max(reducible, key=widths.__getitem__)
        widths[widest] -= 1
        excess -= 1
    return widths, gap


def runs_table(results: Sequence[dict[str, Any]]) -> None:
    """Results of training in a table like those of the paper."""
    columns = run_columns(results)
    rows = [[show_cell(key, result.get(key)) for key in columns] for result in results]
    attacks = " and ".join(dict.fromkeys(str(result["attack"]) for result in results))
    headers = list(columns.values())
    print_table(headers, rows, note=legend(headers, RA=attacks))


def run_columns(results: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The entries of these results that a table shows, with their headers."""
    columns = dict(RUN_COLUMNS)
    if not any("aa" in result for result in results):
        del columns["aa"]
    if any(result.get("last_batch") not in (None, result.get("batch")) for result in results):
        columns["last_batch"] = "Last batch"
    if any(result.get("protocol", "dense") != "dense" for result in results):
        columns |= {"bits": "Bits", "protocol": "Protocol"}
    if any("ema_ra" in result for result in results):
        columns |= {"ema_ta": "EMA TA (%)", "ema_ra": "EMA RA (%)"}
    return columns


def show_cell(key: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if key.startswith(("comm", "train", "mb")) else f"{value:.2f}"
    return str(value)


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", ""))
    except ValueError:
        return text == "-"
    return True
