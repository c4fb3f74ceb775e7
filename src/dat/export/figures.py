"""What was measured of a run's weights: in training, by `dat evaluate` and by `dat certify`."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from dat.build import read_result
from dat.certification.certify import TABLE
from dat.evaluation.journal import ABOUT, FIGURES, weights_of
from dat.evaluation.suites import AUTOATTACK
from dat.train.folder import RESULT

PREFIXES = {"best": "", "ema-best": "ema_"}
"""Weights that training measures, and how their figures begin."""


def known_figures(
    run: Path, weights: Path, model: nn.Module, deployed: nn.Module
) -> list[dict[str, Any]]:
    """Each a dict of name (TA, RA, AA, CA), value in percent, the images, and under what.

    An evaluation counts only if it was of these very weights, whatever they are called.
    """
    found = list(_of_training(run, weights))
    found += _of_evaluations(run / "evaluations", weights_of(deployed))
    found += _of_certificates(run / "certificates", weights_of(model))
    once: dict[tuple[object, ...], dict[str, Any]] = {}
    for it in found:
        once.setdefault((it["name"], it["images"], it["under"]), it)
    return list(once.values())


def _figure(name: str, value: float, images: int, under: str) -> dict[str, Any]:
    return {"name": name, "value": value, "images": images, "under": under}


def _of_training(run: Path, weights: Path) -> Iterator[dict[str, Any]]:
    own = weights.parent.resolve() == run.resolve() and weights.stem in PREFIXES
    if not own or not (run / RESULT).is_file():
        return
    result, prefix = read_result(run), PREFIXES[weights.stem]
    attack, images = str(result["attack"]), int(result["images"])
    threat = attack.rpartition(", ")[2]
    under = {"ta": "no attack", "ra": attack, "aa": f"{AUTOATTACK}, {threat}"}
    for key, text in under.items():
        value = result.get(f"{prefix}{key}")
        if value is not None:
            yield _figure(key.upper(), value, images, text)


def _of_evaluations(folder: Path, weights: str) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob(f"*/{FIGURES}")):
        about, figures = _read(path.parent / ABOUT), _read(path)
        if about.get("weights") != weights:
            continue
        name, threat = str(about["suite"]), about["threat"]
        under = f"{name}, {threat['norm']} {threat['eps']:.4g}"
        yield _figure("TA", figures["ta"], figures["images"], "no attack")
        yield _figure("AA" if name == AUTOATTACK else "RA", figures["ra"], figures["images"], under)


def _of_certificates(folder: Path, weights: str) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob(f"*/{TABLE}")):
        about = _read(path.parent / ABOUT)
        if about.get("weights") != weights:
            continue
        rows = list(csv.DictReader(path.read_text().splitlines(), delimiter="\t"))
        reached = [float(row["radius"]) if row["correct"] == "1" else -1.0 for row in rows]
        for radius in _radii(about):
            written = float(f"{radius:.6g}")  # as the table has it
            share = 100.0 * sum(it >= written for it in reached) / len(rows)
            under = f"certified within l2 {radius:g}, sigma {about['sigma']:g}"
            yield _figure("CA", share, len(rows), under)


def _radii(about: dict[str, Any]) -> list[float]:
    """Those that were asked for, or where whole radii were, some multiples of sigma."""
    asked = re.search(r"radii=\(([^)]*)\)", str(about["plan"]))
    words = asked[1].split(",") if asked else []
    radii = [float(word) for word in words if word.strip()]
    return radii or [about["sigma"] * quarter / 2 for quarter in range(8)]


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
