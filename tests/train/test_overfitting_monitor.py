"""Catastrophic overfitting is detected immediately, and a run recovers from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dat import evaluation
from dat.attacks import FGSM, NFGSM, PGD, Free, NoAttack
from dat.data import ImageData
from dat.distributed import World
from dat.evaluation import Accuracy
from dat.optim import SGD, Constant
from dat.train import Callback, Trainer
from dat.train.overfitting_monitor import Collapse, OverfittingMonitor
from dat.train.selection import BestWeights
from tests.trainers import make_trainer


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join() as joined:
        yield joined


@pytest.mark.parametrize(
    ("history", "collapsed"),
    [
        ([50.0], False),
        ([50.0, 26.0], False),
        ([50.0, 24.0], True),
        ([50.0, 60.0, 31.0, 29.0], True),
        ([9.0, 0.0], False),
        ([0.0, 10.0, 0.0], True),
    ],
)
def test_a_collapse_is_a_drop_below_half(history: list[float], collapsed: bool) -> None:
    assert OverfittingMonitor().collapsed(history) == collapsed


def test_only_single_step_attacks_are_monitored() -> None:
    single_step = [FGSM(), NFGSM(), Free()]
    assert all(OverfittingMonitor().watches(attack) for attack in single_step)
    assert not any(OverfittingMonitor().watches(attack) for attack in (PGD(), NoAttack()))
    assert OverfittingMonitor().watches(PGD(steps=1)) and not OverfittingMonitor(
        action="off"
    ).watches(FGSM())
    with pytest.raises(ValueError, match="action = 'panic': must be one of off, warn, stop"):
        OverfittingMonitor(action="panic")


class Diary(Callback):
    def __init__(self) -> None:
        self.collapses: list[Collapse] = []
        self.epochs: list[int] = []

    def on_collapse(self, trainer: Trainer, collapse: Collapse) -> None:
        self.collapses.append(collapse)

    def on_epoch_end(self, trainer: Trainer, record: Any) -> None:
        self.epochs.append(record.epoch)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def run(
    world: World, monkeypatch: pytest.MonkeyPatch, action: str, *, select_every: int = 1
) -> tuple[Trainer, Diary, list[Tensor]]:
    """Six epochs; FGSM collapses at the third evaluation. Also the weights at each evaluation."""
    random = torch.Generator().manual_seed(0)
    images = ImageData.of(torch.rand(40, 1, 3, 3, generator=random), torch.arange(40) % 2)
    after: list[Tensor] = []

    def probe(model: nn.Module, data: ImageData, **options: Any) -> Accuracy:
        after.append(flat(model))
        bad = len(after) >= 3 and isinstance(made.worker.inner.attack, FGSM)
        return Accuracy(100, 90, 1 if bad else 40)

    monkeypatch.setattr(evaluation, "evaluate", probe)
    diary = Diary()
    made = make_trainer(
        model=nn.Sequential(nn.Flatten(), nn.Linear(9, 2)),
        data=images,
        holdout=images,
        attack=FGSM(),
        optimizer=SGD(lr=0.5, momentum=0.9),
        schedule=Constant(),
        epochs=6,
        batch=20,
        ema=0.5,
        select_every=select_every,
        sentinel=action,
        world=world,
        callbacks=[diary],
    )
    return made, diary, after


def test_a_warning_changes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    made, diary, _ = run(world, monkeypatch, "warn")
    assert len(made.fit()) == 6
    assert diary.epochs == [1, 2, 3, 4, 5, 6] and diary.collapses
    assert "fell from 40.0 to 1.0 % on held-out images" in str(diary.collapses[0])


def test_stop_ends_the_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    made, diary, after = run(world, monkeypatch, "stop")
    assert len(made.fit()) == 1 and made.best_epoch() == 1
    assert len(diary.collapses) == 1 and diary.epochs == [1]
    assert "stopping with the weights of epoch 1" in str(diary.collapses[0])
    assert torch.equal(flat(made.model), after[0]) and torch.equal(
        flat(made.best_model()), after[0]
    )


def test_rescue_returns_to_the_last_good_epoch_and_changes_the_attack(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each epoch evaluates the model and its average: the third evaluation belongs to epoch 2."""
    made, diary, after = run(world, monkeypatch, "rescue")
    restored: list[Tensor] = []
    original = Trainer._train

    def watch(self: Trainer, epoch: int) -> Any:
        if diary.collapses and not restored:
            restored.append(flat(self.model))
        return original(self, epoch)

    monkeypatch.setattr(Trainer, "_train", watch)
    records = made.fit()
    assert diary.epochs == [1, 2, 3, 4, 5, 6]  # the collapsed epoch is not reported
    assert [record.epoch for record in records] == [1, 2, 3, 4, 5, 6]
    assert made.updates == 7 * made.steps and made.discarded_seconds > 0
    (collapse,) = diary.collapses
    assert (collapse.epoch, collapse.back_to) == (2, 1)
    assert isinstance(made.worker.inner.attack, NFGSM)
    assert torch.equal(restored[0], after[0]) and not torch.equal(restored[0], after[2])


def test_without_model_selection_the_monitor_evaluates_itself(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last good weights then count as the best, because no others were evaluated."""
    made, diary, after = run(world, monkeypatch, "stop", select_every=6)
    assert len(made.fit()) == 2 and diary.collapses[0].epoch == 3
    assert made.best_epoch() == 2 and torch.equal(flat(made.best_model()), after[1])


def test_a_collapsed_epoch_is_never_the_best(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clean accuracy may be highest in that epoch."""
    made, diary, after = run(world, monkeypatch, "rescue")
    made.parts.one(BestWeights).best.by = "ta"

    def probe(model: nn.Module, data: ImageData, **options: Any) -> Accuracy:
        bad = isinstance(made.worker.inner.attack, FGSM) and len(after) >= 2
        after.append(flat(model))
        return Accuracy(100, 99, 1) if bad else Accuracy(100, 90, 40)

    monkeypatch.setattr(evaluation, "evaluate", probe)
    made.fit()
    assert diary.collapses and made.best_epoch() == 1
    assert torch.equal(flat(made.best_model()), after[0])


def test_a_second_collapse_is_reported_as_such() -> None:
    assert "for the second time" in str(Collapse(5, 40.0, 1.0, "rescue"))
