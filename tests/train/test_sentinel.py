"""Catastrophic overfitting is seen at once, and a run is brought back from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dat.attacks import FGSM, NFGSM, PGD, Free, NoAttack
from dat.comm import World
from dat.data import ImageData
from dat.evaluation import Accuracy
from dat.optim import SGD, Constant
from dat.train import Listener, Trainer, selection
from dat.train.sentinel import Collapse, Sentinel


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join() as joined:
        yield joined


@pytest.mark.parametrize(
    ("seen", "collapsed"),
    [
        ([50.0], False),
        ([50.0, 26.0], False),
        ([50.0, 24.0], True),
        ([50.0, 60.0, 31.0, 29.0], True),
        ([9.0, 0.0], False),
        ([0.0, 10.0, 0.0], True),
    ],
)
def test_a_collapse_is_a_fall_to_less_than_half(seen: list[float], collapsed: bool) -> None:
    assert Sentinel().collapsed(seen) == collapsed


def test_only_single_steps_are_watched() -> None:
    watched = [FGSM(), NFGSM(), Free()]
    assert all(Sentinel().watches(attack) for attack in watched)
    assert not any(Sentinel().watches(attack) for attack in (PGD(), NoAttack()))
    assert Sentinel().watches(PGD(steps=1)) and not Sentinel(action="off").watches(FGSM())
    with pytest.raises(ValueError, match="action = 'panic': must be one of off, warn, stop"):
        Sentinel(action="panic")


class Diary(Listener):
    def __init__(self) -> None:
        self.collapses: list[Collapse] = []
        self.epochs: list[int] = []

    def collapsed(self, trainer: Trainer, collapse: Collapse) -> None:
        self.collapses.append(collapse)

    def epoch_ended(self, trainer: Trainer, record: Any) -> None:
        self.epochs.append(record.epoch)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def run(
    world: World, monkeypatch: pytest.MonkeyPatch, action: str, *, select_every: int = 1
) -> tuple[Trainer, Diary, list[Tensor]]:
    """Six epochs of which the third seems to collapse under FGSM; the weights after each."""
    random = torch.Generator().manual_seed(0)
    images = ImageData.of(torch.rand(40, 1, 3, 3, generator=random), torch.arange(40) % 2)
    after: list[Tensor] = []

    def probe(model: nn.Module, data: ImageData, **options: Any) -> Accuracy:
        after.append(flat(model))
        bad = len(after) >= 3 and isinstance(made.worker.attack, FGSM)
        return Accuracy(100, 90, 1 if bad else 40)

    monkeypatch.setattr(selection, "evaluate", probe)
    diary = Diary()
    made = Trainer(
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
        sentinel=Sentinel(action=action),
        world=world,
        listeners=[diary],
    )
    return made, diary, after


def test_a_warning_changes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    made, diary, _ = run(world, monkeypatch, "warn")
    assert len(made.fit()) == 6
    assert diary.epochs == [1, 2, 3, 4, 5, 6] and diary.collapses
    assert "fell from 40.0 to 1.0 % on held-out images" in str(diary.collapses[0])


def test_a_run_is_stopped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    made, diary, after = run(world, monkeypatch, "stop")
    assert len(made.fit()) == 1 and made.best_epoch() == 1
    assert len(diary.collapses) == 1 and diary.epochs == [1]
    assert "stopping with the weights of epoch 1" in str(diary.collapses[0])
    assert torch.equal(flat(made.model), after[0]) and torch.equal(
        flat(made.best_model()), after[0]
    )


def test_a_run_goes_back_to_the_last_good_epoch_and_on_with_another_attack(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models are measured an epoch, the raw weights and the averages: the third measurement is
    that of epoch 2."""
    made, diary, after = run(world, monkeypatch, "rescue")
    restored: list[Tensor] = []
    original = Trainer._train

    def watch(self: Trainer, epoch: int) -> Any:
        if diary.collapses and not restored:
            restored.append(flat(self.model))
        return original(self, epoch)

    monkeypatch.setattr(Trainer, "_train", watch)
    records = made.fit()
    assert diary.epochs == [1, 2, 3, 4, 5, 6]  # the collapsed one is not told as an epoch
    assert [record.epoch for record in records] == [1, 2, 3, 4, 5, 6]
    assert made.updates == 7 * made.steps and made.discarded_seconds > 0
    (collapse,) = diary.collapses
    assert (collapse.epoch, collapse.back_to) == (2, 1)
    assert isinstance(made.worker.attack, NFGSM)
    assert torch.equal(restored[0], after[0]) and not torch.equal(restored[0], after[2])


def test_without_a_measurement_it_probes_by_itself(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the last good weights are the best, as no others were measured."""
    made, diary, after = run(world, monkeypatch, "stop", select_every=6)
    assert len(made.fit()) == 2 and diary.collapses[0].epoch == 3
    assert made.best_epoch() == 2 and torch.equal(flat(made.best_model()), after[1])


def test_a_collapsed_epoch_is_never_the_best(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clean accuracy may be highest just there."""
    made, diary, after = run(world, monkeypatch, "rescue")
    made.select_by = "ta"

    def probe(model: nn.Module, data: ImageData, **options: Any) -> Accuracy:
        bad = isinstance(made.worker.attack, FGSM) and len(after) >= 2
        after.append(flat(model))
        return Accuracy(100, 99, 1) if bad else Accuracy(100, 90, 40)

    monkeypatch.setattr(selection, "evaluate", probe)
    made.fit()
    assert diary.collapses and made.best_epoch() == 1
    assert torch.equal(flat(made.best_model()), after[0])


def test_a_second_collapse_is_told_as_such() -> None:
    assert "for the second time" in str(Collapse(5, 40.0, 1.0, "rescue"))
