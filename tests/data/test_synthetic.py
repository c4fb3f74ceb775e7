"""Generated images with labels, as published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dat.data import ImageData, LazyImages, Mix, PartitionPlan, load_synthetic, make_batches

RANDOM = np.random.default_rng(0)
LIKE = ImageData.of(
    torch.from_numpy(RANDOM.integers(0, 256, (60, 3, 8, 8), dtype=np.uint8)),
    torch.arange(60) % 4,
)


def write(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return str(path)


def published(count: int = 100) -> dict[str, Any]:
    """Channels last, as generated images are published."""
    images = RANDOM.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    return {"image": images, "label": np.arange(count) % 4}


@pytest.mark.parametrize("memory", [1.0, 1e-6])
def test_images_are_read_or_mapped(tmp_path: Path, memory: float) -> None:
    arrays = published()
    data = load_synthetic(write(tmp_path / "1m.npz", **arrays), LIKE, memory)
    assert isinstance(data.images, LazyImages) == (memory < 1)
    assert data.classes == 4 and data.labels.tolist() == arrays["label"].tolist()
    expected = torch.from_numpy(arrays["image"]).permute(0, 3, 1, 2)
    assert torch.equal(data.tensor(), expected)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no labels": (
        {"image": published()["image"]},
        "contains image, but needs the arrays image and",
    ),
    "another size": (
        {"image": np.zeros((4, 9, 9, 3), np.uint8), "label": np.arange(4)},
        r"its images are \(3, 9, 9\), those of the training set \(3, 8, 8\)",
    ),
    "another dtype": (
        {"image": np.zeros((4, 8, 8, 3), np.float32), "label": np.arange(4)},
        "its pixels are torch.float32, those of the training set torch.uint8",
    ),
    "too many classes": (
        {"image": np.zeros((5, 8, 8, 3), np.uint8), "label": np.arange(5)},
        "label 4 of image 4: must be from 0 to 3",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_unsuitable_files_are_refused(tmp_path: Path, case: str) -> None:
    arrays, message = BAD[case]
    with pytest.raises(ValueError, match=f"data.synthetic = .*{message}"):
        load_synthetic(write(tmp_path / "bad.npz", **arrays), LIKE)


def test_unlabelled_share_and_epoch_length(tmp_path: Path) -> None:
    data = load_synthetic(write(tmp_path / "1m.npz", **published()), LIKE)
    mix = Mix(share=0.7, epoch_by="original", name="synthetic")
    made = make_batches(LIKE, data, mix, PartitionPlan(batch=20, workers=1, rank=0, seed=0))
    assert made.steps == 60 // 20
    for epoch, step in ((0, 0), (0, 2), (40, 1)):
        batch = made.draw(epoch, step, torch.device("cpu"))
        assert (batch.numbers >= len(LIKE)).sum() == 14
        assert batch.weight.unique().tolist() == [1.0]
    plan, mix = PartitionPlan(batch=20, workers=1, rank=0, seed=0), replace(mix, share=0.01)
    with pytest.raises(ValueError, match=r"data.synthetic_share = 0.01: leaves 20 labelled and 0"):
        make_batches(LIKE, data, mix, plan)
