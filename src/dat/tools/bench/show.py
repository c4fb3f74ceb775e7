"""Show measurements as tables, JSON and plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dat.report import bar_chart, print_json, print_table
from dat.tools.bench.timing import Comparison

COMM_NOTE = (
    "s: seconds to sum {values:,} values over {workers} workers, kernels included, without a "
    "backward pass to overlap; the slowest worker, median of {repeats}. x: speedup over dense on "
    "the same link. MiB: sent by all workers together, by the busiest one, and to other nodes, as "
    "counted by the ledger; wire: as counted by the network interfaces, headers and "
    "acknowledgements included."
)
QUANTIZER_NOTE = (
    "{values:,} values, {threads} threads; medians, measured in turns. Copy: torch copies the same "
    "floats. (E+D)/C: encode and decode relative to the copy. Bits/value: step sizes included. "
    "Noise: squared error over squared norm, for normal random numbers."
)


def show_comm(rows: Sequence[dict[str, Any]], *, as_json: bool, plot: Path | None) -> None:
    dense = {row["link"]: row["seconds"] for row in rows if row["protocol"] == "dense"}
    if as_json:
        print_json(rows)
    else:
        sizes = {
            "bytes": "MiB",
            "bytes_busiest": "MiB busiest",
            "bytes_between": "MiB between",
            "bytes_interface": "MiB wire",
        }
        headers = ["Link", "Protocol", "Bits", "s", "x", *sizes.values()]
        lines = [
            [
                row["link"],
                row["protocol"],
                str(row["bits"]),
                f"{row['seconds']:.3f}",
                f"{dense[row['link']] / row['seconds']:.2f}" if row["link"] in dense else "-",
                *(_mebi(row.get(key)) for key in sizes),
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


def show_comparison(comparison: Comparison, *, as_json: bool, plot: Path | None) -> None:
    """One line per implementation, with the best that the machine can do."""
    rows, counted = comparison.rows(), comparison.images > 0
    unit = "img/s" if counted else "ms"

    def figure(seconds: float) -> float:
        return comparison.images / seconds if counted else 1e3 * seconds

    if as_json:
        print_json(comparison.dump())
    else:
        columns = {
            key: name for key, name in OPTIONAL_COLUMNS.items() if any(key in r for r in rows)
        }
        headers = ["", unit, "Quartiles", "x", f"Limit ({unit})", "% of limit", *columns.values()]
        lines = [
            [
                row["name"],
                _number(figure(row["seconds"])),
                " to ".join(map(_number, _spread(row, figure))),
                f"{row['ratio']:.2f}",
                _number(figure(row["limit_seconds"])),
                f"{100 * row['limit_share']:.0f}",
                *(_cell(key, row.get(key)) for key in columns),
            ]
            for row in rows
        ]
        print_table(headers, lines, note=_note(comparison))
    if plot:
        bar_chart(
            plot,
            [row["name"] for row in rows],
            {unit: [figure(row["seconds"]) for row in rows]},
            title=f"dat bench {comparison.bench}",
            axis=f"{unit} (grey: the best this machine can do)\n{_words(comparison.settings)}",
            spread=[_spread(row, figure) for row in rows],
            limits=[figure(row["limit_seconds"]) for row in rows],
        )


OPTIONAL_COLUMNS = {
    "gflops": "GFLOP/s",
    "gb_per_second": "GB/s",
    "peak_bytes": "Peak (MiB)",
    "state_bytes": "State (bytes/parameter)",
}


def _spread(row: dict[str, Any], figure: Callable[[float], float]) -> tuple[float, float]:
    low, high = sorted((figure(row["seconds_low"]), figure(row["seconds_high"])))
    return low, high


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    return _mebi(int(value)) if key == "peak_bytes" else _number(value)


def _number(value: float) -> str:
    """At least three digits, with thousands separators and without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _note(comparison: Comparison) -> str:
    machine, timings = comparison.machine, comparison.timings
    first, turns = next(iter(timings)), len(next(iter(timings.values())).seconds)
    lines = [
        f"{_words(comparison.settings)}.",
        f"Medians of {turns} turns, in rounds. x: speed relative to {first}.",
        f"Limit: {comparison.limit}.",
        f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']} on "
        f"{machine['threads']} thread{'s' * (machine['threads'] != 1)}, allocator: "
        f"{_words(machine['allocator']) or 'system default'}.",
        f"Matrix product: {machine['matmul_gflops']:.3g} GFLOP/s; copy: "
        f"{machine['copy_gb_per_second']:.3g} GB/s.",
        *(f"{note}." for note in comparison.notes),
    ]
    return "\n".join(lines)


def _words(values: Mapping[str, Any]) -> str:
    shown = {name: f"{v:.4g}" if isinstance(v, float) else v for name, v in values.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items() if value is not None)


def _mebi(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.1f}"
