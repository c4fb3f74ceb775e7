"""What a run says while it runs."""

from __future__ import annotations

import io
import re

import pytest
import torch
from rich.console import Console
from torch import nn

from dat.attacks import FGSM
from dat.core.progress import progress_bar
from dat.core.threat import ThreatModel
from dat.data import ImageData
from dat.distributed import World
from dat.optim import LAMB
from dat.report.progress import Progress, crowded
from dat.train import Trainer
from tests.trainers import make_trainer


def fit(epochs: int, *, batch: int = 16) -> Trainer:
    images, labels = torch.rand(32, 8, 8), torch.arange(32) % 2
    with World.join() as world:
        trainer = make_trainer(
            model=nn.Sequential(nn.Flatten(), nn.Linear(64, 2)),
            data=ImageData.of(images, labels),
            threat=ThreatModel(eps=0.1),
            attack=FGSM(),
            optimizer=LAMB(lr=0.01),
            epochs=epochs,
            batch=batch,
            world=world,
            callbacks=[Progress("runs/mine")],
        )
        trainer.fit()
    return trainer


def test_in_a_file_an_epoch_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    fit(2)
    printed = [line.split()[:2] for line in capsys.readouterr().err.splitlines()]
    assert [first for first, _ in printed] == ["runs/mine:", "computes:", "epoch", "epoch"]
    assert [second for _, second in printed[2:]] == ["1/2", "2/2"]


def test_one_epoch_of_one_step_is_singular(capsys: pytest.CaptureFixture[str]) -> None:
    fit(1, batch=32)
    assert "1 worker, 32 images, 1 epoch of 1 step, batch 32" in capsys.readouterr().err


def epoch_lines(trainer: Trainer) -> list[str]:
    """What a terminal keeps of these epochs above its bar."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, highlight=False, width=200)
    with World.join() as world:
        trainer.world, progress = world, Progress("runs/mine", console)
        progress.on_fit_start(trainer)
        for number in range(1, trainer.epochs + 1):
            record = trainer.records[0]._replace(epoch=number, holdout_ta=90.0, holdout_ra=50.0)
            progress.on_epoch_end(trainer, record)
        progress.on_fit_end(trainer)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    return re.split(r"[\r\n]+", plain)


def test_a_terminal_keeps_some_epochs_and_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = fit(1)
    trainer.epochs = 200
    monkeypatch.setattr(trainer, "best_epoch", lambda: 37)
    lines = epoch_lines(trainer)
    shown = [line.split()[1] for line in lines if line.startswith("epoch ")]
    assert shown == ["1/200", *(f"{number}/200" for number in range(5, 201, 5))]
    assert any(line.startswith("best: epoch 37/200 ") for line in lines)
    legends = [line for line in lines if line.startswith("TA: clean accuracy; RA: robust")]
    assert len(legends) == 1


def test_a_short_run_keeps_all_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = fit(1)
    trainer.epochs = 3
    shown = [line.split()[1] for line in epoch_lines(trainer) if line.startswith("epoch ")]
    assert shown == ["1/3", "2/3", "3/3"]


def test_without_a_terminal_long_work_prints_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = iter((0.0, 10.0, 31.0, 40.0, 62.0))
    with progress_bar("evaluating", show=True, clock=lambda: next(times)) as progress:
        for done in (10, 25, 30, 50):
            progress(done, 100)
    assert capsys.readouterr().err.splitlines() == [
        "evaluating: 25 % after 31 s, about 93 s left",
        "evaluating: 50 % after 62 s, about 62 s left",
    ]


def test_a_hidden_bar_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter((0.0, 31.0))
    with progress_bar("evaluating", show=False, clock=lambda: next(times)) as progress:
        progress(1, 2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("local_size", "device", "noted"), [(6, "cpu", True), (2, "cpu", False), (6, "cuda", False)]
)
def test_more_workers_than_cores_are_told(local_size: int, device: str, noted: bool) -> None:
    world = World(0, 6, torch.device(device), "gloo", owner=False, local_size=local_size)
    assert ("6 workers share 2 cores" in crowded(world, 2)) == noted
