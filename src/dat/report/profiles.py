"""Where the time and the memory of a step go, as a table."""

from __future__ import annotations

from typing import Any

from dat.report.tables import print_json, print_table

NAMES = {
    "data": "data",
    "attack/forward": "attack: forward",
    "attack/backward": "attack: backward",
    "attack": "attack: start, step, projection",
    "update/forward": "update: forward",
    "update/backward": "update: backward",
    "exchange": "exchange, as far as it is waited for",
    "optimizer": "optimizer",
    "rest": "rest",
}


def show_profile(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    rows = [
        [
            NAMES[it["stage"]],
            f"{1e3 * it['seconds']:.2f}",
            f"{100 * it['share']:.1f}",
            f"{1e6 * it['seconds_per_image']:.1f}",
            _mebi(it["peak_bytes"]),
            _mebi(it["grown_bytes"]),
        ]
        for it in found["stages"]
    ]
    whole = 1e6 * found["seconds"] / found["batch"]
    total = f"{1e3 * found['seconds']:.2f}"
    memory = [_mebi(found["peak_bytes"]), _mebi(found["grown_bytes"])]
    rows.append(["a step", total, "100.0", f"{whole:.1f}", *memory])
    headers = ["", "ms", "%", "us/image", "Peak (MiB)", "Growth (MiB)"]
    print_table(headers, rows, note=_note(found))


def _note(found: dict[str, Any]) -> str:
    low, middle, high = (1e3 * it for it in found["seconds_quartiles"])
    exchange = found["exchange"]
    lines = [
        f"{found['recipe']}: {_count(found['workers'], 'worker')}, {found['device']}, "
        f"{_count(found['threads'], 'thread')} each, batch {found['batch']}: "
        f"{found['images_per_second']:,.1f} images/s.",
        f"Means over {_count(found['steps'], 'step')} and all workers; the median step took "
        f"{middle:.1f} ms, quartiles {low:.1f} and {high:.1f}.",
        f"Exchange: {1e3 * exchange['busy_seconds']:.2f} ms under way beside the backward pass, "
        f"{exchange['bytes'] / 2**20:.2f} MiB sent by a worker.",
        "Peak: memory above that before the first step, while the stage lasts. Growth: what stayed",
        "after it, over the first three steps. Both of the worker that has the most.",
    ]
    if found["trace"]:
        lines.append(f"{found['trace']}: two more steps, for ui.perfetto.dev or chrome://tracing.")
    return "\n".join(lines)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def _mebi(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.1f}"
