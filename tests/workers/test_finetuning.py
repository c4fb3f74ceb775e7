"""Fine-tuning with several workers."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.workers.conftest import DAT, SMALL, run, train, weights

FAST = ("attack.steps=1", "train.batch=640")
IMAGES = """
from dat.data import ImageData, load

def small():
    data = load("digits")
    splits = (data.train, data.test)
    return tuple(ImageData.of(split.images[:, :, ::2, ::2], split.labels % 5) for split in splits)
"""


def test_frozen_layers_keep_their_bits_on_three_workers(tmp_path: Path) -> None:
    """The mean of three equal statistics may round to another number."""
    (tmp_path / "mine.py").write_text(IMAGES)
    origin = train(DAT, tmp_path, *SMALL, *FAST, "model.name=preact-resnet18", "model.width=2")
    settings = (*SMALL[1:], *FAST, "data.name=mine:small", "finetune.layers=2")
    words = ("finetune", str(origin), "digits", *settings, "--workers", "3", "--out", "tuned")
    result = run([*DAT, *words, "--quiet"], tmp_path)
    assert result.returncode == 0, result.stderr
    tuned = weights(tmp_path / "tuned")
    for name, value in weights(origin, "best").items():
        trained = name.startswith(("net.stages.3.", "net.linear."))
        assert torch.equal(value, tuned[f"net.{name}"]) is not trained, name
