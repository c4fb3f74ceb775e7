"""Results for a run's weights, from training, `dat evaluate` and `dat certify`."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from dat.attacks.suites import AUTOATTACK
from dat.config.runs import read_result
from dat.core.files import RESULT
from dat.core.threat import show_radius
from dat.evaluation.certification.certify import TABLE
from dat.evaluation.progress_file import ABOUT, FIGURES, weights_of

PREFIXES = {"best": "", "ema-best": "ema_"}
"""Weights that training evaluates, and the prefix of their results."""


def known_figures(
    run: Path, weights: Path, model: nn.Module, deployed: nn.Module
) -> list[dict[str, Any]]:
    """Dicts of name (TA, RA, AA, CA), value in percent, number of images, and attack.

    Evaluations are included only if they are of exactly these weights, whatever their file name.
    """
    figures = list(_from_training(run, weights))
    figures += _from_evaluations(run / "evaluations", weights_of(deployed))
    figures += _from_certificates(run / "certificates", weights_of(model))
    unique: dict[tuple[object, ...], dict[str, Any]] = {}
    for figure in figures:
        unique.setdefault((figure["name"], figure["images"], figure["under"]), figure)
    return list(unique.values())


def _figure(name: str, value: float, images: int, under: str) -> dict[str, Any]:
    return {"name": name, "value": value, "images": images, "under": under}


def _from_training(run: Path, weights: Path) -> Iterator[dict[str, Any]]:
    from_run = weights.parent.resolve() == run.resolve() and weights.stem in PREFIXES
    if not from_run or not (run / RESULT).is_file():
        return
    result, prefix = read_result(run), PREFIXES[weights.stem]
    attack, images = str(result["attack"]), int(result["images"])
    threat = attack.rpartition(", ")[2]
    under = {"ta": "no attack", "ra": attack, "aa": f"{AUTOATTACK}, {threat}"}
    for key, text in under.items():
        value = result.get(f"{prefix}{key}")
        if value is not None:
            yield _figure(key.upper(), value, images, text)


def _from_evaluations(folder: Path, weights: str) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob(f"*/{FIGURES}")):
        about, figures = _read(path.parent / ABOUT), _read(path)
        if about.get("weights") != weights:
            continue
        name, threat = str(about["suite"]), about["threat"]
        under = f"{name}, {threat['norm']} {show_radius(threat['eps'])}"
        yield _figure("TA", figures["ta"], figures["images"], "no attack")
        yield _figure("AA" if name == AUTOATTACK else "RA", figures["ra"], figures["images"], under)


def _from_certificates(folder: Path, weights: str) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob(f"*/{TABLE}")):
        about = _read(path.parent / ABOUT)
        if about.get("weights") != weights:
            continue
        rows = list(csv.DictReader(path.read_text().splitlines(), delimiter="\t"))
        certified = [float(row["radius"]) if row["correct"] == "1" else -1.0 for row in rows]
        for radius in _radii(about):
            rounded = float(f"{radius:.6g}")  # as in the table
            share = 100.0 * sum(reached >= rounded for reached in certified) / len(rows)
            under = f"certified within l2 {radius:g}, sigma {about['sigma']:g}"
            yield _figure("CA", share, len(rows), under)


def _radii(about: dict[str, Any]) -> list[float]:
    """The requested radii, or multiples of sigma / 2 if none were requested."""
    requested = re.search(r"radii=\(([^)]*)\)", str(about["plan"]))
    numbers = requested[1].split(",") if requested else []
    radii = [float(number) for number in numbers if number.strip()]
    return radii or [about["sigma"] * half / 2 for half in range(8)]


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
