"""Evaluations and sweeps as tables and plots."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dat.core.glossary import legend, plural
from dat.core.threat import show_radius
from dat.report.plots import Chart, line_charts
from dat.report.tables import print_json, print_table

if TYPE_CHECKING:
    from dat.evaluation import Curve

NOTE = "{legend} {images} test images, {threat}. Network under attack: {network}."
ROBUST = "correct on the clean image and under the attack that heads the column"
DETAIL = (
    "Broken: images broken by this attack and by none before it. RA: share of images that are "
    "still robust. Passes: samples in forward and backward passes. s: seconds, summed over the "
    "workers."
)


def warn(warnings: Sequence[str]) -> None:
    """Print warnings about a result to standard error."""
    for text in warnings:
        print(f"warning: {text}", file=sys.stderr)


def show_evaluation(report: dict[str, Any], *, as_json: bool) -> None:
    """One evaluation: RA under each suite, and for suites of several attacks what each broke."""
    warn(report["warnings"])
    if as_json:
        print_json(report)
        return
    names = [name for name in report["suites"] if name != "clean"]
    row = [report["run"], report["weights"], f"{report['ta']:.2f}"]
    row += [f"{report['suites'][name]['ra']:.2f}" for name in names]
    threat = report["attack"].rpartition(", ")[2]
    terms = legend(["TA", *(["RA"] if names else [])], RA=ROBUST)
    note = NOTE.format(
        legend=terms, images=report["images"], threat=threat, network=report["network"]
    )
    print_table(["Run", "Weights", "TA (%)", *(f"{name} (%)" for name in names)], [row], note=note)
    for name in names:
        _show_suite(name, report)


def _show_suite(name: str, report: dict[str, Any]) -> None:
    fell, costs = report["suites"][name]["fell"], report["suites"][name]["costs"]
    if len(fell) < 2:
        return
    left, rows = report["ta"], [["clean", "", f"{report['ta']:.2f}", "", "", ""]]
    for attack, broken in fell.items():
        left -= 100 * broken / report["images"]
        cost = costs[attack]
        passes = [f"{cost[key]:,}" for key in ("forwards", "backwards")]
        rows.append([attack, str(broken), f"{left:.2f}", *passes, f"{cost['seconds']:.1f}"])
    print()
    headers = [name, "Broken", "RA (%)", "Forward passes", "Backward passes", "s"]
    print_table(headers, rows, note=DETAIL)


def show_certified(report: dict[str, Any], *, as_json: bool, plot: Path | None) -> None:
    """Certified accuracy over the radius."""
    if as_json:
        print_json(report)
    else:
        rows = [
            [f"{row['radius']:.4g}", f"{row['ca']:.2f}", f"{row['samples']:,.0f}"]
            for row in report["ca"]
        ]
        print_table(["r (l2)", "CA (%)", "Samples per image"], rows, note=_certified_note(report))
    if plot:
        points = [row["radius"] for row in report["ca"]], [row["ca"] for row in report["ca"]]
        axis = f"CA (%), sigma {report['sigma']:g}"
        line_charts(plot, [Chart({report["run"]: points}, x_axis="l2 radius", y_axis=axis)])


def show_labelled(report: dict[str, Any], *, as_json: bool) -> None:
    """The number of pseudo-labels per class, and their confidence."""
    if as_json:
        print_json(report)
        return
    rows = [[str(number), str(images)] for number, images in enumerate(report["classes"])]
    confident = ", ".join(
        f"{images} at {least} or more" for least, images in report["at_least"].items()
    )
    note = f"{report['images']} labels in {report['file']}. Average confidence "
    note += f"{report['confidence']:.3f}; {confident}."
    print_table(["Class", "Images"], rows, note=note)


def _certified_note(report: dict[str, Any]) -> str:
    terms = legend(["r", "CA"], CA="correct, and certified within r")
    at_least = "" if report["mode"] == "fixed" else "at least "
    return (
        f"{terms} {report['images']} test images of {report['run']}, "
        f"sigma {report['sigma']:g}; each certificate false with probability at most "
        f"{report['alpha']:g}. {report['mode'].capitalize()} sampling: "
        f"{report['samples_per_image']:,.0f} samples per image of at most {report['n']:,}, "
        f"{report['samples_per_second']:,.0f} per second and worker in batches of "
        f"{report['batch']}; {report['seconds']:.1f} s. Average certified radius (ACR) "
        f"{at_least}{report['acr']:.3f}; {plural(report['abstained'], 'abstention')}."
    )


def _swept(quantity: str, value: float) -> str:
    return show_radius(value) if quantity == "eps" else f"{value:.4g}"


def show_sweep(
    curves: Mapping[str, Sequence[Curve]],
    warnings: Sequence[str],
    *,
    attack: str,
    as_json: bool,
    plot: Path | None,
) -> None:
    """One table per swept quantity with one column per run, and one plot."""
    warn(warnings)
    pairs = [(run, curve) for run, run_curves in curves.items() for curve in run_curves]
    by_quantity: dict[str, dict[str, Curve]] = {}
    for run, curve in pairs:
        by_quantity.setdefault(curve.over, {})[run] = curve
    if as_json:
        dumped = [{"run": run, **curve._asdict()} for run, curve in pairs]
        print_json({"attack": attack, "curves": dumped, "warnings": list(warnings)})
    else:
        for number, (quantity, by_run) in enumerate(by_quantity.items()):
            if number:
                print()
            values = next(iter(by_run.values())).values
            rows = [
                [_swept(quantity, value), *(f"{curve.ra[index]:.2f}" for curve in by_run.values())]
                for index, value in enumerate(values)
            ]
            headers = [quantity, *(f"{run} (%)" for run in by_run)]
            print_table(headers, rows, note=legend(["RA"], RA=f"{attack}, over {quantity}"))
    if plot:
        line_charts(
            plot,
            [
                Chart(
                    {run: (curve.values, curve.ra) for run, curve in by_run.items()},
                    x_axis=quantity,
                    y_axis=f"RA (%), {attack}",
                    logarithmic=quantity == "steps",
                )
                for quantity, by_run in by_quantity.items()
            ],
        )
