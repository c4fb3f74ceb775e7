"""Fine-tuning on several workers."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.distributed.conftest import DAT, SMALL, run, train, weights

NET = ("model.name=preact-resnet18", "model.width=2", "train.batch=640")
IMAGES = """
import dat
from dat.data import load

def small():
    data = load("digits")
    return tuple(
        dat.ImageData.of(part.images[:, :, ::2, ::2], part.labels % 5) for part in (data.train, data.test)
    )
"""


def test_frozen_layers_stay_to_the_bit_on_three_workers(tmp_path: Path) -> None:
    """The mean of three equal statistics may be another number."""
    (tmp_path / "mine.py").write_text(IMAGES)
    origin = train(DAT, tmp_path, *SMALL, *NET)
    settings = (*SMALL[1:], "train.batch=640", "data.name=mine:small", "finetune.layers=2")
    words = ("finetune", str(origin), "digits", *settings, "--workers", "3", "--out", "tuned")
    done = run([*DAT, *words, "--quiet"], tmp_path)
    assert done.returncode == 0, done.stderr
    after = weights(tmp_path / "tuned")
    changed = {
        name.split(".")[1]
        for name, value in weights(origin, "best").items()
        if not torch.equal(value, after[f"net.{name}"])
    }
    assert changed == {"stages", "linear"}
    learnt = [name for name in after if not name.startswith(("net.net.stages.3", "net.net.linear"))]
    before = weights(origin, "best")
    assert all(torch.equal(after[name], before[name.removeprefix("net.")]) for name in learnt)
