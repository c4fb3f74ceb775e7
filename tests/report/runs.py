"""Folders of runs that were never run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml

from dat.report import save_picture

EPOCHS = 3


def make_run(folder: Path, *, names: tuple[str, ...] = ("cat", "dog"), **options: Any) -> Path:
    """A finished run of two workers with its closer look; `options` replace parts of its files."""
    folder.mkdir(parents=True)
    files: dict[str, Any] = {
        "config": config(),
        "environment": {"dat": "0", "workers": 2, "command": ["train", "digits"]},
        "metrics": [epoch(number) for number in range(1, EPOCHS + 1)],
        "result": result(),
        "examination": examination(names),
    } | options
    (folder / "config.yaml").write_text(yaml.safe_dump(files["config"]))
    for name in ("environment", "result", "examination"):
        if files[name] is not None:
            (folder / f"{name}.json").write_text(json.dumps(files[name]))
    lines = "".join(json.dumps(epoch) + "\n" for epoch in files["metrics"])
    (folder / "metrics.jsonl").write_text(lines)
    (folder / "gallery").mkdir()
    for number in range(2):
        for kind in ("clean", "change", "adversarial"):
            save_picture(torch.rand(1, 4, 4), folder / "gallery" / f"{number:02d}-{kind}.png")
    return folder


def config(**changes: Any) -> dict[str, Any]:
    return {
        "recipe": "digits",
        "data": {"name": "digits"},
        "model": {"name": "cnn"},
        "threat": {"norm": "linf", "eps": 0.2},
        "attack": {"name": "pgd", "steps": 7},
        "seed": 0,
    } | changes


def epoch(number: int) -> dict[str, Any]:
    return {
        "epoch": number,
        "lr": 0.05,
        "loss": 2.0 / number,
        "train_ra": 20.0 * number,
        "seconds": 4.0,
        "comm_seconds": 1.0,
        "exposed_seconds": 0.5,
        "attack_seconds": 2.0,
        "update_seconds": 1.5,
        "mb_per_step": 2.0,
        "mb_busiest": 1.0,
        "mb_epoch": 20.0,
        "holdout_ta": 70.0 + number,
        "holdout_ra": 40.0 + number,
        "trust_ratios": {"first.weight": 0.1 * number, "last.weight": 2.0},
    }


def result(**changes: Any) -> dict[str, Any]:
    return {
        "method": "DAT-PGD",
        "workers": 2,
        "batch": 128,
        "quantizer": "bucket",
        "bits": 8,
        "protocol": "chunked",
        "images": 360,
        "ta": 95.56,
        "ra": 55.83,
        "attack": "pgd-20, linf 0.2",
        "best_epoch": 3,
        "warnings": [],
        "comm_seconds_per_epoch": 1.0,
        "exposed_seconds_per_epoch": 0.5,
        "train_seconds_per_epoch": 4.0,
        "mb_per_step": 2.27,
        "mb_busiest": 1.14,
        "mb_per_epoch": 22.7,
    } | changes


def examination(names: tuple[str, ...]) -> dict[str, Any]:
    """Two images of each class: one stands, the other is taken for the next class."""
    classes = len(names)
    picture = {
        "image": 0,
        "label": 0,
        "fell": True,
        "clean": {"class": 0, "sure": 0.9},
        "adversarial": {"class": 1, "sure": 0.6},
        "distance": 0.2,
        "highest": 0.2,
    }
    return {
        "attack": "pgd-20",
        "threat": {"norm": "linf", "eps": 0.2},
        "images": 2 * classes,
        "names": list(names),
        "ta": 100.0,
        "ra": 50.0,
        "classes": [{"images": 2, "right": 2, "standing": 1}] * classes,
        "confusions": sorted(
            [label, predicted, 1]
            for label in range(classes)
            for predicted in (label, (label + 1) % classes)
        ),
        "curves": [
            {"over": "eps", "values": [0.0, 0.2, 0.4], "ra": [100.0, 50.0, 0.0]},
            {"over": "steps", "values": [1, 10, 50], "ra": [60.0, 50.0, 50.0]},
        ],
        "warnings": [],
        "gallery": [picture, picture | {"fell": False, "adversarial": {"class": 0, "sure": 0.5}}],
    }
