"""The measurements as tables, as JSON, as pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dat.bench.race import Race
from dat.report import bar_chart, print_json, print_table

COMM_NOTE = (
    "s: seconds for one sum of {values:,} values over {workers} workers, kernels included, nothing "
    "hidden behind a backward pass; the slowest worker, median of {repeats}. x: times faster than "
    "dense on the same link. MiB: what all workers send together, the busiest one, and to other "
    "nodes, as counted by the ledger; wire: what the interfaces counted, headers and "
    "acknowledgements included."
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


def show_race(race: Race, *, as_json: bool, plot: Path | None) -> None:
    """Contestants line by line, each beside what the machine could do at best."""
    rows, counted = race.rows(), race.images > 0
    unit = "img/s" if counted else "ms"

    def figure(seconds: float) -> float:
        return race.images / seconds if counted else 1e3 * seconds

    if as_json:
        print_json(race.dump())
    else:
        columns = {key: name for key, name in RACE_COLUMNS.items() if any(key in r for r in rows)}
        headers = ["", unit, "Quartiles", "x", f"Limit ({unit})", "Of it (%)", *columns.values()]
        lines = [
            [
                row["name"],
                _number(figure(row["seconds"])),
                " to ".join(map(_number, _spread(row, figure))),
                f"{row['ratio']:.2f}",
                _number(figure(row["limit_seconds"])),
                f"{100 * row['limit_share']:.0f}",
                *(_race_cell(key, row.get(key)) for key in columns),
            ]
            for row in rows
        ]
        print_table(headers, lines, note=_race_note(race))
    if plot:
        bar_chart(
            plot,
            [row["name"] for row in rows],
            {unit: [figure(row["seconds"]) for row in rows]},
            title=f"dat bench {race.bench}",
            axis=f"{unit} (grey: what the machine can do at best)\n{_words(race.settings)}",
            spread=[_spread(row, figure) for row in rows],
            limits=[figure(row["limit_seconds"]) for row in rows],
        )


RACE_COLUMNS = {
    "gflops": "GFLOP/s",
    "gb_per_second": "GB/s",
    "peak_bytes": "Peak (MiB)",
    "state_bytes": "State (bytes/parameter)",
}


def _spread(row: dict[str, Any], figure: Callable[[float], float]) -> tuple[float, float]:
    low, high = sorted((figure(row["seconds_low"]), figure(row["seconds_high"])))
    return low, high


def _race_cell(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    return _mebi(int(value)) if key == "peak_bytes" else _number(value)


def _number(value: float) -> str:
    """Three digits or more, with commas and never with an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _race_note(race: Race) -> str:
    machine = race.machine
    first, turns = next(iter(race.timings)), len(next(iter(race.timings.values())).seconds)
    lines = [
        f"{_words(race.settings)}.",
        f"Medians of {turns} turns, in rounds. x: times as fast as {first}.",
        f"Limit: {race.limit}.",
        f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']} on "
        f"{machine['threads']} thread{'s' * (machine['threads'] != 1)}, allocator: "
        f"{_words(machine['allocator']) or 'as the system has it'}.",
        f"A product of matrices: {machine['matmul_gflops']:.3g} GFLOP/s; a copy: "
        f"{machine['copy_gb_per_second']:.3g} GB/s.",
        *(f"{note}." for note in race.notes),
    ]
    return "\n".join(lines)


def _words(values: Mapping[str, Any]) -> str:
    shown = {key: f"{it:.4g}" if isinstance(it, float) else it for key, it in values.items()}
    return ", ".join(f"{key} {it}" for key, it in shown.items() if it is not None)


def _mebi(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.1f}"
