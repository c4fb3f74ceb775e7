"""Abbreviations in tables, spelled out; numbers with their nouns; durations."""

from __future__ import annotations

import re
from collections.abc import Iterable

TERMS = {
    "TA": "clean accuracy",
    "RA": "robust accuracy",
    "AA": "accuracy under AutoAttack",
    "CA": "certified accuracy",
    "EMA": "exponential moving average of the weights",
    "M": "workers",
    "C": "seconds of communication per epoch",
    "T": "seconds of training per epoch, communication included",
    "MB/it": "megabytes sent per iteration by all workers together",
    "MB": "megabytes",
    "MiB": "mebibytes",
    "it": "iteration",
    "r": "radius",
    "s": "seconds",
    "ms": "milliseconds",
    "us": "microseconds",
    "img/s": "images per second",
}


def plural(number: int, noun: str) -> str:
    """`1 epoch`, `2 epochs`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def seconds(value: object) -> str:
    """A duration in the unit that suits it."""
    if not isinstance(value, int | float):
        return "-"
    if value >= 3600:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.1f} min" if value >= 120 else f"{value:.3g} s"


def legend(columns: Iterable[str], **details: str) -> str:
    """One line that spells out the abbreviations in these headers, each once: "TA: clean accuracy,
    RA: robust accuracy (pgd-20, linf 8/255)." with `RA="pgd-20, linf 8/255"`."""
    without_units = (re.sub(r"\(.*?\)", "", column) for column in columns)
    words = [word for column in without_units for word in re.findall(r"[A-Za-z/]+", column)]
    shown = [
        f"{word}: {TERMS[word]}" + (f" ({details[word]})" if word in details else "")
        for word in dict.fromkeys(words)
        if word in TERMS
    ]
    return f"{'; '.join(shown)}." if shown else ""
