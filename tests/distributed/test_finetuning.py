"""Fine-tuning on several workers."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.distributed.conftest import DAT, SMALL, run, train, weights

FAST = ("attack.steps=1", "train.batch=640")
IMAGES = """
from dat.data import ImageData, load

def small():
    data = load("digits")
    both = (data.train, data.test)
    return tuple(ImageData.of(it.images[:, :, ::2, ::2], it.labels % 5) for it in both)
"""


def test_frozen_layers_stay_to_the_bit_on_three_workers(tmp_path: Path) -> None:
    """The mean of three equal statistics may be another number."""
    (tmp_path / "mine.py").write_text(IMAGES)
    origin = train(DAT, tmp_path, *SMALL, *FAST, "model.name=preact-resnet18", "model.width=2")
    settings = (*SMALL[1:], *FAST, "data.name=mine:small", "finetune.layers=2")
    words = ("finetune", str(origin), "digits", *settings, "--workers", "3", "--out", "tuned")
    done = run([*DAT, *words, "--quiet"], tmp_path)
    assert done.returncode == 0, done.stderr
    after = weights(tmp_path / "tuned")
    for name, value in weights(origin, "best").items():
        learns = name.startswith(("net.stages.3.", "net.linear."))
        assert torch.equal(value, after[f"net.{name}"]) is not learns, name
