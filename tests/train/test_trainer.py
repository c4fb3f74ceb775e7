"""The training loop around Algorithm 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dat.attacks import FGSM, PGD, Attack, NoAttack
from dat.core.settings import SettingError
from dat.core.threat import ThreatModel
from dat.data import ImageData, load, split_holdout
from dat.distributed import World
from dat.evaluation import Accuracy, evaluate
from dat.models import build_model
from dat.optim import (
    LAMB,
    LARS,
    Cosine,
    LAMBSettings,
    LARSSettings,
    Muon,
    MuonSettings,
    OptimizerSettings,
    Piecewise,
)
from dat.train import Callback, EpochRecord, NotFinite, Trainer
from dat.train.selection import BestWeights
from tests.trainers import make_trainer

THREAT = ThreatModel(eps=0.2)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join() as joined:
        yield joined


def made(world: World, **settings: object) -> Trainer:
    train, holdout = split_holdout(load("digits").train, 0.1, 0)
    plain = {
        "model": build_model("cnn", 10, channels=1, width=8),
        "data": train,
        "holdout": holdout,
        "threat": THREAT,
        "attack": PGD(steps=3),
        "select_steps": 3,
        "optimizer": LAMB(lr=0.05),
        "schedule": Cosine(),
        "epochs": 3,
        "batch": 240,
        "world": world,
    }
    return make_trainer(**plain | settings)


class Diary(Callback):
    """Records all events."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.best: list[tuple[str, dict[str, torch.Tensor]]] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        self.events.append("started")

    def on_new_best(self, trainer: Trainer, name: str, model: nn.Module) -> None:
        self.best.append((name, {k: v.clone() for k, v in model.state_dict().items()}))

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        self.events.append(f"epoch {record.epoch}")

    def on_fit_end(self, trainer: Trainer) -> None:
        self.events.append("ended")


@pytest.fixture(scope="module")
def trained(world: World) -> tuple[Trainer, list[EpochRecord], Diary]:
    diary = Diary()
    trainer = made(world, ema=0.9, callbacks=[diary])
    return trainer, trainer.fit(), diary


def test_callbacks_are_called(trained: tuple[Trainer, list[EpochRecord], Diary]) -> None:
    assert trained[2].events == ["started", "epoch 1", "epoch 2", "epoch 3", "ended"]


def test_the_best_weights_are_those_with_the_highest_held_out_ra(
    trained: tuple[Trainer, list[EpochRecord], Diary],
) -> None:
    trainer, records, diary = trained
    ra = [record.holdout_ra for record in records]
    assert ra[(trainer.best_epoch() or 0) - 1] == max(r for r in ra if r is not None)
    last = [state for name, state in diary.best if name == ""][-1]
    best = trainer.best_model().state_dict()
    assert all(torch.equal(last[key], best[key]) for key in best)


def test_averaged_weights_are_evaluated_like_the_model(
    trained: tuple[Trainer, list[EpochRecord], Diary], world: World
) -> None:
    trainer, records, _ = trained
    holdout = trainer.images.holdout
    assert isinstance(holdout, ImageData)
    for name, ta, ra in (
        ("", records[-1].holdout_ta, records[-1].holdout_ra),
        ("ema-", records[-1].ema_ta, records[-1].ema_ra),
    ):
        accuracy = evaluate(
            trainer.models()[name], holdout, threat=THREAT, attack=PGD(steps=3), world=world
        )
        assert (accuracy.ta, accuracy.ra) == (ta, ra)


def test_the_schedule_sets_the_learning_rate(
    trained: tuple[Trainer, list[EpochRecord], Diary],
) -> None:
    trainer, records, _ = trained
    steps = trainer.steps
    for epoch, record in enumerate(records):
        assert record.lr == pytest.approx(0.05 * Cosine()(epoch + (steps - 1) / steps, 3))


def test_one_worker_sends_nothing(trained: tuple[Trainer, list[EpochRecord], Diary]) -> None:
    assert all(record.mb_per_step == 0 for record in trained[1])


def test_without_held_out_images_the_last_weights_are_the_best(world: World) -> None:
    trainer = made(world, holdout=None, epochs=2)
    records = trainer.fit()
    assert trainer.best_model() is trainer.model
    assert trainer.best_epoch() == 2
    assert all(record.holdout_ra is None for record in records)


def test_held_out_images_may_be_evaluated_less_often(world: World) -> None:
    records = made(world, select_every=2, attack=NoAttack()).fit()
    assert [record.holdout_ra is None for record in records] == [True, False, False]


def test_selection_by_clean_accuracy(world: World) -> None:
    for by, second in (("ta", False), ("ra", True)):
        best = made(world, select_by=by).parts.one(BestWeights).best
        assert best.consider("", nn.Linear(1, 1), Accuracy(10, 9, 1), 1)
        assert best.consider("", nn.Linear(1, 1), Accuracy(10, 8, 8), 2) == second


def test_any_torch_optimizer_works(world: World) -> None:
    trainer = made(
        world,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        schedule=Piecewise(milestones=(1,)),
        attack=NoAttack(),
        epochs=2,
    )
    records = trainer.fit()
    assert [record.lr for record in records] == pytest.approx([0.01, 0.001])
    assert records[1].loss < records[0].loss


@pytest.mark.parametrize(
    "settings",
    [LAMB(lr=0.05, preset="modern"), LARS(lr=0.05), Muon(lr=0.01, head="muon")],
    ids=["lamb", "lars", "muon"],
)
def test_settings_a_function_and_an_optimizer_give_the_same_bits(
    world: World, settings: OptimizerSettings
) -> None:
    kind: Any = {LAMBSettings: LAMB, LARSSettings: LARS, MuonSettings: Muon}[type(settings)]

    def train(optimizer: Any, model: nn.Module) -> dict[str, torch.Tensor]:
        options = {"attack": NoAttack(), "epochs": 1, "holdout": None}
        trainer = made(world, optimizer=optimizer, model=model, **options)
        trainer.fit()
        return trainer.model.state_dict()

    models = [build_model("cnn", 10, channels=1, width=4, seed=1) for _ in range(3)]
    expected = train(settings, models[0])
    function = train(lambda model: kind.of(settings, model.parameters()), models[1])
    own = train(kind.of(settings, models[2].parameters()), models[2])
    for name, value in expected.items():
        assert torch.equal(value, function[name])
        assert torch.equal(value, own[name])


def test_an_optimizer_of_another_model_is_refused(world: World) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="has parameters that are not the model's"):
        made(world, optimizer=optimizer)


def test_the_class_of_an_optimizer_is_refused(world: World) -> None:
    with pytest.raises(TypeError, match="optimizer = LAMB: is a class; pass settings"):
        made(world, optimizer=LAMB)


def test_weights_that_are_not_finite_are_neither_evaluated_nor_saved(world: World) -> None:
    class Explodes(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                parameter.data.fill_(float("inf"))

    diary = Diary()
    trainer = made(
        world,
        optimizer=lambda model: Explodes(model.parameters(), lr=0.1),
        batch=1293,
        callbacks=[diary],
    )
    with pytest.raises(NotFinite, match=r"epoch 1: features\.0\.weight is not finite"):
        trainer.fit()
    assert diary.events == ["started", "ended"]
    assert diary.best == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"select_by": "loss"}, "select_by = 'loss': must be"),
        ({"batch": 9999}, "train.batch = 9999: there are only 1293"),
    ],
)
def test_wrong_settings_are_refused(
    world: World, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        made(world, **settings)


def test_standard_training_collapses_and_dat_does_not(world: World) -> None:
    """The point of the project, on a smaller network than the README's table."""

    def accuracy(attack: Attack, select_by: str) -> Accuracy:
        trainer = made(
            world,
            model=build_model("cnn", 10, channels=1, width=16),
            attack=attack,
            select_by=select_by,
            select_every=4,
            optimizer=LAMB(lr=0.02),
            epochs=16,
            batch=64,
        )
        trainer.fit()
        test = load("digits").test
        return evaluate(trainer.best_model(), test, threat=THREAT, world=world)

    standard = accuracy(NoAttack(), "ta")
    assert standard.ta > 95
    assert standard.ra < 40
    for attack in (PGD(steps=7), FGSM()):
        robust = accuracy(attack, "ra")
        assert robust.ta > 90
        assert robust.ra > standard.ra + 15


def test_all_conflicting_settings_are_reported_at_once(world: World) -> None:
    with pytest.raises(SettingError) as error:
        made(world, resize=(6,), resize_until=(9,), eps_warmup=5)
    assert len(error.value.mistakes) == 2
    assert str(error.value).startswith("2 mistakes\n  ")
