"""What a run says while it runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dat.attacks import FGSM
from dat.core.threat import ThreatModel
from dat.data import ImageData
from dat.distributed import World
from dat.optim import LAMB
from dat.report.progress import Progress, crowded
from tests.trainers import make_trainer


def test_in_a_file_an_epoch_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    images, labels = torch.rand(32, 8, 8), torch.arange(32) % 2
    with World.join() as world:
        make_trainer(
            model=nn.Sequential(nn.Flatten(), nn.Linear(64, 2)),
            data=ImageData.of(images, labels),
            threat=ThreatModel(eps=0.1),
            attack=FGSM(),
            optimizer=LAMB(lr=0.01),
            epochs=2,
            batch=16,
            world=world,
            callbacks=[Progress("runs/mine")],
        ).fit()
    printed = [line.split()[:2] for line in capsys.readouterr().err.splitlines()]
    assert [first for first, _ in printed] == ["runs/mine:", "computes:", "epoch", "epoch"]
    assert [second for _, second in printed[2:]] == ["1/2", "2/2"]


@pytest.mark.parametrize(
    ("local_size", "device", "noted"), [(6, "cpu", True), (2, "cpu", False), (6, "cuda", False)]
)
def test_more_workers_than_cores_are_told(local_size: int, device: str, noted: bool) -> None:
    world = World(0, 6, torch.device(device), "gloo", owner=False, local_size=local_size)
    assert ("6 workers share 2 cores" in crowded(world, 2)) == noted
