"""Evaluations and sweeps as tables and pictures."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dat.evaluation import Curve
from dat.report.plots import Chart, line_charts
from dat.report.tables import print_json, print_table

NOTE = (
    "RA (%): right on the clean image and after the attack; {images} test images, {threat}. "
    "Network under attack: {network}."
)
DETAIL = (
    "Fell: images that this attack broke and none before it. Left: what still stands, in % of all. "
    "Passes: samples through the network, forward and backward. s: added up over the workers."
)


def warn(warnings: Sequence[str]) -> None:
    """What makes a result doubtful, on standard error."""
    for text in warnings:
        print(f"warning: {text}", file=sys.stderr)


def show_measured(found: dict[str, Any], *, as_json: bool) -> None:
    """One evaluation: RA under each suite, and who fell to what where a suite has several."""
    warn(found["warnings"])
    if as_json:
        print_json(found)
        return
    names = [name for name in found["suites"] if name != "clean"]
    row = [found["run"], found["weights"], f"{found['ta']:.2f}"]
    row += [f"{found['suites'][name]['ra']:.2f}" for name in names]
    threat = found["attack"].rpartition(", ")[2]
    note = NOTE.format(images=found["images"], threat=threat, network=found["network"])
    print_table(["Run", "Weights", "TA (%)", *(f"{name} (%)" for name in names)], [row], note=note)
    for name in names:
        _show_suite(name, found)


def _show_suite(name: str, found: dict[str, Any]) -> None:
    fell, costs = found["suites"][name]["fell"], found["suites"][name]["costs"]
    if len(fell) < 2:
        return
    left, rows = found["ta"], [["clean", "", f"{found['ta']:.2f}", "", "", ""]]
    for attack, count in fell.items():
        left -= 100 * count / found["images"]
        cost = costs[attack]
        passes = [f"{cost[key]:,}" for key in ("forwards", "backwards")]
        rows.append([attack, str(count), f"{left:.2f}", *passes, f"{cost['seconds']:.1f}"])
    print()
    headers = [name, "Fell", "Left (%)", "Forward passes", "Backward passes", "s"]
    print_table(headers, rows, note=DETAIL)


def show_certified(found: dict[str, Any], *, as_json: bool, plot: Path | None) -> None:
    """Certified accuracy over the radius."""
    if as_json:
        print_json(found)
    else:
        rows = [
            [f"{row['radius']:.4g}", f"{row['ca']:.2f}", f"{row['samples']:,.0f}"]
            for row in found["ca"]
        ]
        print_table(["r (l2)", "CA (%)", "Samples an image"], rows, note=_certified_note(found))
    if plot:
        points = [row["radius"] for row in found["ca"]], [row["ca"] for row in found["ca"]]
        axis = f"CA (%), sigma {found['sigma']:g}"
        line_charts(plot, [Chart({found["run"]: points}, x_axis="l2 radius", y_axis=axis)])


def show_labelled(found: dict[str, Any], *, as_json: bool) -> None:
    """How many pseudo-labels of each class, and how sure they are."""
    if as_json:
        print_json(found)
        return
    rows = [[str(number), str(count)] for number, count in enumerate(found["classes"])]
    sure = ", ".join(f"{count} at {least} or more" for least, count in found["at_least"].items())
    note = f"{found['images']} labels in {found['file']}. Confidence {found['confidence']:.3f} on "
    print_table(["Class", "Images"], rows, note=f"{note}average; {sure}.")


def _certified_note(found: dict[str, Any]) -> str:
    at_least = "" if found["mode"] == "fixed" else "at least "
    return (
        f"CA: right, and provably the same within r; {found['images']} test images of "
        f"{found['run']}, sigma {found['sigma']:g}, chance of a false claim {found['alpha']:g} an "
        f"image. {found['mode'].capitalize()} sampling: {found['samples_per_image']:,.0f} samples "
        f"an image of at most {found['n']:,}, {found['samples_per_second']:,.0f} a second and "
        f"worker in batches of {found['batch']}; {found['seconds']:.1f} s. "
        f"Average certified radius (ACR) {at_least}{found['acr']:.3f}; {found['abstained']} "
        f"abstained."
    )


def show_sweep(
    curves: Mapping[str, Sequence[Curve]],
    warnings: Sequence[str],
    *,
    attack: str,
    as_json: bool,
    plot: Path | None,
) -> None:
    """A table for each thing swept over, a column a run; and one picture."""
    warn(warnings)
    kinds = list(dict.fromkeys(curve.over for found in curves.values() for curve in found))
    by_kind = {
        kind: {run: curve for run, found in curves.items() for curve in found if curve.over == kind}
        for kind in kinds
    }
    if as_json:
        plain = [{"run": run, **c._asdict()} for run, found in curves.items() for c in found]
        print_json({"attack": attack, "curves": plain, "warnings": list(warnings)})
    else:
        for number, (kind, found) in enumerate(by_kind.items()):
            if number:
                print()
            values = next(iter(found.values())).values
            rows = [
                [f"{value:.4g}", *(f"{curve.ra[place]:.2f}" for curve in found.values())]
                for place, value in enumerate(values)
            ]
            headers = [kind, *(f"{run} (%)" for run in found)]
            print_table(headers, rows, note=f"RA under {attack} over {kind}.")
    if plot:
        line_charts(
            plot,
            [
                Chart(
                    {run: (curve.values, curve.ra) for run, curve in found.items()},
                    x_axis=kind,
                    y_axis=f"RA (%), {attack}",
                    logarithmic=kind == "steps",
                )
                for kind, found in by_kind.items()
            ],
        )
