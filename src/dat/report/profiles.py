"""A step profile as a table: time and memory by stage."""

from __future__ import annotations

from typing import Any

from dat.core.glossary import plural
from dat.report.tables import print_json, print_table

NAMES = {
    "data": "data",
    "attack/forward": "attack: forward",
    "attack/backward": "attack: backward",
    "attack": "attack: start, step, projection",
    "update/forward": "update: forward",
    "update/backward": "update: backward",
    "exchange": "exchange, waiting only",
    "optimizer": "optimizer",
    "rest": "rest",
}


def show_profile(profile: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(profile)
        return
    rows = [
        [
            NAMES[stage["stage"]],
            f"{1e3 * stage['seconds']:.2f}",
            f"{100 * stage['share']:.1f}",
            f"{1e6 * stage['seconds_per_image']:.1f}",
            _mebi(stage["peak_bytes"]),
            _mebi(stage["grown_bytes"]),
        ]
        for stage in profile["stages"]
    ]
    microseconds = 1e6 * profile["seconds"] / profile["batch"]
    total = f"{1e3 * profile['seconds']:.2f}"
    memory = [_mebi(profile["peak_bytes"]), _mebi(profile["grown_bytes"])]
    rows.append(["a step", total, "100.0", f"{microseconds:.1f}", *memory])
    headers = ["", "ms", "%", "us/image", "Peak (MiB)", "Growth (MiB)"]
    print_table(headers, rows, note=_note(profile))


def _note(profile: dict[str, Any]) -> str:
    low, middle, high = (1e3 * seconds for seconds in profile["seconds_quartiles"])
    exchange = profile["exchange"]
    lines = [
        f"{profile['recipe']}: {plural(profile['workers'], 'worker')}, {profile['device']}, "
        f"{plural(profile['threads'], 'thread')} each, batch {profile['batch']}: "
        f"{profile['images_per_second']:,.1f} images/s.",
        f"Means over {plural(profile['steps'], 'step')} and all workers; the median step took "
        f"{middle:.1f} ms, quartiles {low:.1f} and {high:.1f}.",
        f"Exchange: {1e3 * exchange['busy_seconds']:.2f} ms in total, including what overlaps with "
        f"the backward pass; {exchange['bytes'] / 2**20:.2f} MiB sent per worker.",
        "Peak: memory during the stage, relative to before the first step. Growth: memory kept",
        "after it, over the first three steps. Both are the maximum over the workers.",
    ]
    if profile["trace"]:
        lines.append(
            f"{profile['trace']}: two more steps, for ui.perfetto.dev or chrome://tracing."
        )
    return "\n".join(lines)


def _mebi(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.1f}"
