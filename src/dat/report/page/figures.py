"""The charts of the page, without markup: over epochs, eps, steps and the radius."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dat.report.page.gather import RunRecord
from dat.report.plots import Chart, Heat, Stack


@dataclass(frozen=True)
class Figure:
    """A chart, with a note on how to read it."""

    name: str
    """Used in file names and links."""
    title: str
    chart: Chart | Stack | Heat
    note: str = ""


def training(runs: Sequence[RunRecord]) -> list[Figure]:
    """The metrics of each epoch."""
    figures = [_over_epochs(runs, "loss", "Training loss", "loss")]
    if len(runs) == 1:
        figures.append(_accuracies(runs[0]))
    else:
        for key, title in (("holdout_ta", "Held-out TA"), ("holdout_ra", "Held-out RA")):
            figures.append(_over_epochs(runs, key, title, f"{title} (%)"))
    figures.append(_over_epochs(runs, "lr", "Learning rate", "learning rate"))
    for run in runs:
        figures += _times(run, several=len(runs) > 1)
    return [
        figure for figure in figures if not isinstance(figure.chart, Chart) or figure.chart.lines
    ]


def _label(run: RunRecord, runs: Sequence[RunRecord]) -> str:
    """The name of a run's line; empty if there is only one run."""
    return run.name if len(runs) > 1 else ""


def _line(run: RunRecord, key: str) -> tuple[list[float], list[float]]:
    epochs = [epoch for epoch in run.epochs if epoch.get(key) is not None]
    return [epoch["epoch"] for epoch in epochs], [epoch[key] for epoch in epochs]


def _over_epochs(runs: Sequence[RunRecord], key: str, title: str, axis: str) -> Figure:
    lines = {_label(run, runs): _line(run, key) for run in runs if _line(run, key)[0]}
    return Figure(key, title, Chart(lines, "epoch", axis, from_zero=key == "lr"))


def _accuracies(run: RunRecord) -> Figure:
    """All accuracies of one run."""
    names = {
        "holdout_ta": "TA, held out",
        "holdout_ra": "RA, held out",
        "train_ra": "RA, training images",
        "ema_ra": "RA of EMA weights, held out",
    }
    lines = {name: _line(run, key) for key, name in names.items() if _line(run, key)[0]}
    note = "Where held-out RA falls while RA on training images rises, the run overfits."
    return Figure("accuracy", "Accuracy", Chart(lines, "epoch", "%", from_zero=False), note)


def _times(run: RunRecord, *, several: bool) -> list[Figure]:
    """Time per epoch by stage, and LALR's trust ratios per layer."""
    epochs, suffix = run.epochs, f": {run.name}" if several else ""
    figures = []
    if epochs and epochs[0].get("attack_seconds"):
        stages: dict[str, list[float]] = {"attack": [], "update": [], "waiting": [], "rest": []}
        for epoch in epochs:
            exposed = epoch["exposed_seconds"]
            shares = [epoch["attack_seconds"], max(epoch["update_seconds"] - exposed, 0.0), exposed]
            for name, value in zip(
                stages, [*shares, max(epoch["seconds"] - sum(shares), 0.0)], strict=True
            ):
                stages[name].append(value)
        stack = Stack([epoch["epoch"] for epoch in epochs], stages, "epoch", "seconds")
        note = (
            "Attack: the attack used in training. Update: forward, backward and optimizer step. "
            "Waiting: communication not hidden by the backward pass. Rest: data loading, and "
            "workers waiting for the slowest."
        )
        figures.append(Figure(_slug(f"time{suffix}"), f"Time{suffix}", stack, note))
    with_ratios = [epoch for epoch in epochs if epoch.get("trust_ratios")]
    if with_ratios:
        rows = {
            name: [epoch["trust_ratios"].get(name, 0.0) for epoch in with_ratios]
            for name in with_ratios[-1]["trust_ratios"]
        }
        heat = Heat([epoch["epoch"] for epoch in with_ratios], rows, "epoch", "trust ratio")
        note = (
            "The factor by which LALR scaled each layer's step, at the end of each epoch; darker "
            "is larger."
        )
        figures.append(Figure(_slug(f"trust{suffix}"), f"Trust ratios{suffix}", heat, note))
    return figures


def _slug(name: str) -> str:
    """A name for files and links."""
    return "".join(letter if letter.isalnum() else "-" for letter in name).strip("-").lower()


def curves(runs: Sequence[RunRecord]) -> list[Figure]:
    """RA over eps and over the steps: from the latest sweep, otherwise from the error analysis."""
    lines: dict[str, dict[str, tuple[list[float], list[float]]]] = {"eps": {}, "steps": {}}
    for run in runs:
        swept = run.newest("sweep") or run.examined
        for curve in (swept or {}).get("curves", []):
            lines[curve["over"]][_label(run, runs)] = curve["values"], curve["ra"]
    notes = {
        "eps": "RA must fall to 0 as eps grows; if it does not, gradients are masked.",
        "steps": "RA should level off: then more steps break no more images.",
    }
    axes = {"eps": "eps", "steps": "steps of the attack"}
    return [
        Figure(
            f"ra-over-{over}",
            f"RA over {axes[over]}",
            Chart(by_run, axes[over], "RA (%)", logarithmic=over == "steps"),
            notes[over],
        )
        for over, by_run in lines.items()
        if by_run
    ]


def certified(runs: Sequence[RunRecord]) -> list[Figure]:
    """Certified accuracy over the radius."""
    lines = {}
    for run in runs:
        result = run.newest("certify")
        if result:
            points = [(point["radius"], point["ca"]) for point in result["ca"]]
            lines[_label(run, runs)] = [r for r, _ in points], [ca for _, ca in points]
    note = "Within this l2 distance no attack can change the smoothed classifier's prediction."
    chart = Chart(lines, "l2 radius", "CA (%)")
    return [Figure("certified", "Certified accuracy", chart, note)] if lines else []
