"""Every recipe builds its model and trains: one step, with a narrow model and tiny images."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dat.config.build import make_trainer
from dat.config.recipes import names, read
from dat.config.schema import RunConfig, merge
from dat.data import ImageData, Splits
from dat.distributed import World

BATCH, CLASSES = 4, 3
GRAY = ("digits", "mnist", "fashion-mnist")
NARROW = {"wrn": 1, "vit": 8}
"""Widths of the networks whose width is not a number of channels, or must be larger."""
SIDES = {"vit": 16, "mnist": 28}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join(device="cpu", threads=1) as joined:
        yield joined


def images(config: RunConfig) -> Splits:
    """Random images of the recipe's channels, with a step's worth to train on."""
    channels = 1 if config.data.name in GRAY else 3
    side = SIDES.get(config.model.name.split("-")[0], 8)
    generator = torch.Generator().manual_seed(0)
    shape = (2 * BATCH, channels, side, side)
    pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    data = ImageData.of(pixels, torch.arange(len(pixels)) % CLASSES, classes=CLASSES)
    return Splits.of(data, data)


def generated(like: Splits, folder: Path) -> str:
    """A file of generated images."""
    path, test = folder / "generated.npz", like.test
    np.savez(path, image=test.tensor().permute(0, 2, 3, 1).numpy(), label=test.labels.numpy())
    return str(path)


def tiny(name: str, folder: Path) -> tuple[RunConfig, Splits]:
    """The recipe with a narrow model, a small batch, one attack step and one epoch."""
    config = read(name)
    data = images(config)
    sides = config.train.options.image_size.sizes
    train: dict[str, Any] = {"batch": BATCH, "epochs": 1 + len(sides), "select_every": 9}
    train |= {"eps_warmup": 0, "awp_warmup": 0}
    if sides:
        train |= {"resize": [8] * len(sides), "resize_until": [*range(1, 1 + len(sides))]}
    model = config.model.name
    edits: dict[str, Any] = {
        "data": {"holdout": 0, "parts": 1, "loaders": 0, "size": None, "resize": None},
        "model": {"width": NARROW.get(model.split("-")[0], 4)},
        "train": train,
        "schedule": {"warmup": 0},
    }
    if hasattr(config.attack, "steps"):
        edits["attack"] = {"steps": 1}
    if hasattr(config.schedule, "milestones"):
        edits["schedule"]["milestones"] = []
    if config.data.synthetic is not None:
        edits["data"] |= {"synthetic": generated(data, folder), "synthetic_share": 0.5}
    if config.data.augmentation == "resized-crop":  # needs picture files
        edits["data"]["augmentation"] = "crop-flip"
    return RunConfig.read(merge(config.dump(), edits)), data


@pytest.mark.parametrize("name", names())
def test_a_recipe_takes_a_step(name: str, world: World, tmp_path: Path) -> None:
    config, data = tiny(name, tmp_path)
    trainer = make_trainer(config, data, world)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    (record, *_) = trainer.fit()
    assert math.isfinite(record.loss)
    pairs = zip(before, trainer.model.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in pairs)
