"""What the page draws: curves over epochs, over eps and steps, over the radius; no markup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dat.report.page.gather import Told
from dat.report.plots import Chart, Heat, Stack


@dataclass(frozen=True)
class Figure:
    """A chart, with a word on how to read it."""

    name: str
    """For files and links."""
    title: str
    chart: Chart | Stack | Heat
    note: str = ""


def training(runs: Sequence[Told]) -> list[Figure]:
    """What was noted after each epoch."""
    figures = [_over_epochs(runs, "loss", "Training loss", "loss")]
    if len(runs) == 1:
        figures.append(_accuracies(runs[0]))
    else:
        for key, title in (("holdout_ta", "Held-out TA"), ("holdout_ra", "Held-out RA")):
            figures.append(_over_epochs(runs, key, title, f"{title} (%)"))
    figures.append(_over_epochs(runs, "lr", "Learning rate", "learning rate"))
    for run in runs:
        figures += _times(run, several=len(runs) > 1)
    return [it for it in figures if not isinstance(it.chart, Chart) or it.chart.lines]


def _whose(run: Told, runs: Sequence[Told]) -> str:
    """What a run's line is called; one alone needs no name."""
    return run.name if len(runs) > 1 else ""


def _line(run: Told, key: str) -> tuple[list[float], list[float]]:
    known = [it for it in run.epochs if it.get(key) is not None]
    return [it["epoch"] for it in known], [it[key] for it in known]


def _over_epochs(runs: Sequence[Told], key: str, title: str, axis: str) -> Figure:
    lines = {_whose(run, runs): _line(run, key) for run in runs if _line(run, key)[0]}
    return Figure(key, title, Chart(lines, "epoch", axis, from_zero=key == "lr"))


def _accuracies(run: Told) -> Figure:
    """Of one run, all that it tells about accuracy."""
    names = {
        "holdout_ta": "TA, held out",
        "holdout_ra": "RA, held out",
        "train_ra": "RA, training images",
        "ema_ra": "RA of averaged weights, held out",
    }
    lines = {name: _line(run, key) for key, name in names.items() if _line(run, key)[0]}
    note = "Where held-out RA falls while RA on training images rises, the run overfits."
    return Figure("accuracy", "Accuracy", Chart(lines, "epoch", "%", from_zero=False), note)


def _times(run: Told, *, several: bool) -> list[Figure]:
    """Where the time of an epoch goes, and how far LALR scaled the layers."""
    epochs, whose = run.epochs, f": {run.name}" if several else ""
    found = []
    if epochs and epochs[0].get("attack_seconds"):
        parts: dict[str, list[float]] = {"attack": [], "update": [], "waiting": [], "rest": []}
        for it in epochs:
            exposed = it["exposed_seconds"]
            shares = [it["attack_seconds"], max(it["update_seconds"] - exposed, 0.0), exposed]
            for name, value in zip(
                parts, [*shares, max(it["seconds"] - sum(shares), 0.0)], strict=True
            ):
                parts[name].append(value)
        stack = Stack([it["epoch"] for it in epochs], parts, "epoch", "seconds")
        note = (
            "Attack: the inner maximisation. Update: forward, backward and the optimizer's step. "
            "Waiting: what of the exchange the backward pass did not hide. Rest: data, and workers "
            "waiting for the slowest."
        )
        found.append(Figure(_safe(f"time{whose}"), f"Time{whose}", stack, note))
    told = [it for it in epochs if it.get("trust_ratios")]
    if told:
        rows = {
            name: [it["trust_ratios"].get(name, 0.0) for it in told]
            for name in told[-1]["trust_ratios"]
        }
        heat = Heat([it["epoch"] for it in told], rows, "epoch", "trust ratio")
        note = (
            "By how much LALR scaled each layer's step, at the end of each epoch; the stronger "
            "the colour, the larger."
        )
        found.append(Figure(_safe(f"trust{whose}"), f"Trust ratios{whose}", heat, note))
    return found


def _safe(name: str) -> str:
    """A name that files and links can have."""
    return "".join(it if it.isalnum() else "-" for it in name).strip("-").lower()


def curves(runs: Sequence[Told]) -> list[Figure]:
    """RA over eps and over the attack's steps: the newest sweep, else the closer look."""
    lines: dict[str, dict[str, tuple[list[float], list[float]]]] = {"eps": {}, "steps": {}}
    for run in runs:
        swept = run.newest("sweep") or run.examined
        for it in (swept or {}).get("curves", []):
            lines[it["over"]][_whose(run, runs)] = it["values"], it["ra"]
    notes = {
        "eps": "It must fall to 0 as eps grows; if it does not, the attack is blind.",
        "steps": "It should level off: then more steps find no more.",
    }
    words = {"eps": "eps", "steps": "steps of the attack"}
    return [
        Figure(
            f"ra-over-{over}",
            f"RA over {words[over]}",
            Chart(found, words[over], "RA (%)", logarithmic=over == "steps"),
            notes[over],
        )
        for over, found in lines.items()
        if found
    ]


def certified(runs: Sequence[Told]) -> list[Figure]:
    """Certified accuracy over the radius."""
    lines = {}
    for run in runs:
        found = run.newest("certify")
        if found:
            points = [(it["radius"], it["ca"]) for it in found["ca"]]
            lines[_whose(run, runs)] = [r for r, _ in points], [ca for _, ca in points]
    note = "Within this l2 distance no attack whatsoever changes the smoothed classifier's answer."
    chart = Chart(lines, "l2 radius", "CA (%)")
    return [Figure("certified", "Certified accuracy", chart, note)] if lines else []
