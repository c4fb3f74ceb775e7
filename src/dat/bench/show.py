"""The measurements as tables, as JSON, as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dat.report import bar_chart, print_json, print_table

COMM_NOTE = (
    "s: seconds for one sum of {values:,} values over {workers} workers, kernels included, nothing "
    "hidden behind a backward pass; the slowest worker, median of {repeats}. x: times faster than "
    "dense on the same link. MiB: what all workers send together, and the busiest one, as counted "
    "by the ledger; wire: what the interfaces counted, headers and acknowledgements included."
)
QUANTIZER_NOTE = (
    "{values:,} values, {threads} threads, medians in turns. Copy: the same floats by torch. "
    "(E+D)/C: encode and decode beside the copy. Bits/value: with steps. Noise: the squared error "
    "by the squared length, normal random numbers."
)


def show_comm(rows: Sequence[dict[str, Any]], *, as_json: bool, plot: Path | None) -> None:
    dense = {row["link"]: row["seconds"] for row in rows if row["protocol"] == "dense"}
    if as_json:
        print_json(rows)
    else:
        headers = ["Link", "Protocol", "Bits", "s", "x", "MiB", "MiB busiest", "MiB wire"]
        lines = [
            [
                row["link"],
                row["protocol"],
                str(row["bits"]),
                f"{row['seconds']:.3f}",
                f"{dense[row['link']] / row['seconds']:.2f}" if row["link"] in dense else "-",
                *(_mebi(row.get(key)) for key in ("bytes", "bytes_busiest", "bytes_interface")),
            ]
            for row in rows
        ]
        note = COMM_NOTE.format(**rows[0], repeats=len(rows[0]["all_seconds"]))
        print_table(headers, lines, note=note)
    if plot:
        labels = [f"{row['link']}: {row['protocol']}, {row['bits']} bits" for row in rows]
        title = f"Sum of {rows[0]['values']:,} values over {rows[0]['workers']} workers"
        seconds = {"seconds": [row["seconds"] for row in rows]}
        bar_chart(plot, labels, seconds, title=title, axis="seconds")


def show_quantizer(rows: Sequence[dict[str, Any]], *, as_json: bool, plot: Path | None) -> None:
    times = {"encode_ms": "Encode (ms)", "decode_ms": "Decode (ms)", "add_ms": "Add (ms)"}
    if as_json:
        print_json(rows)
    else:
        headers = [
            "Quantizer",
            "Bits",
            "Bits/value",
            *times.values(),
            "Copy (ms)",
            "(E+D)/C",
            "Noise",
        ]
        lines = [
            [
                row["quantizer"],
                str(row["bits"]),
                f"{row['bits_a_value']:.3f}",
                *(f"{row[key]:.2f}" for key in (*times, "copy_ms", "to_copy")),
                f"{row['noise']:.2g}",
            ]
            for row in rows
        ]
        print_table(headers, lines, note=QUANTIZER_NOTE.format(**rows[0]))
    if plot:
        labels = [f"{row['quantizer']}, {row['bits']} bits" for row in rows]
        series = {name: [row[key] for row in rows] for key, name in times.items()}
        title = f"{rows[0]['values']:,} values, {rows[0]['threads']} threads"
        bar_chart(plot, labels, series, title=title, axis="milliseconds")


def _mebi(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.1f}"
