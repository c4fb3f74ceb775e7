"""Growing batches: the images of an update, and refused schedules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dat.attacks import Free, NoAttack
from dat.core.settings import SettingError
from dat.data import ImageData, Mix
from dat.distributed import World
from dat.objectives import TRADES
from dat.optim import SGD, Constant
from dat.train import Trainer
from dat.train.batch_schedule import BatchSchedule
from dat.train.engine import Compute
from tests.trainers import make_trainer

RATE = 0.3


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join(device="cpu", threads=1) as joined:
        yield joined


def data(count: int = 30) -> ImageData:
    images = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    return ImageData.of(images, torch.arange(count) % 3)


def net() -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


def trainer(world: World, **settings: Any) -> Trainer:
    plain: dict[str, Any] = {
        "model": net(),
        "data": data(),
        "attack": NoAttack(),
        "optimizer": SGD(lr=RATE, momentum=0.0, weight_decay=0.0),
        "schedule": Constant(),
        "epochs": 3,
        "batch": 6,
        "grow": (1, 2),
        "grow_by": 2,
        "world": world,
    }
    return make_trainer(**plain | settings)


def test_factors() -> None:
    growing = BatchSchedule(epochs=(2, 5), factor=3)
    assert [growing.batches(epoch) for epoch in range(7)] == [1, 1, 3, 3, 3, 9, 9]
    assert BatchSchedule().batches(100) == 1


@pytest.mark.parametrize("pieces", [1, 2])
def test_an_update_takes_more_batches_after_each_growth(world: World, pieces: int) -> None:
    """Five batches per epoch: five updates, then two of twelve images, then one of 24."""
    made, other = trainer(world, compute=Compute(pieces=pieces)), net()
    records = made.fit()
    images, plan = data(), made.batches.sources[0].sampler
    for epoch, times in enumerate((1, 2, 4)):
        for update in range(5 // times):
            steps = range(update * times, (update + 1) * times)
            index = torch.cat([plan.draw(epoch, step, 0) for step in steps])
            assert len(index.unique()) == 6 * times
            other.zero_grad()
            F.cross_entropy(other(images.images[index]), images.labels[index]).backward()
            with torch.no_grad():
                for parameter in other.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(RATE * parameter.grad)
    for ours, theirs in zip(made.model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert made.updates == 5 + 2 + 1
    assert [record.batch for record in records] == [6, 12, 24]
    assert [made.steps_in(epoch) for epoch in range(3)] == [5, 2, 1]


def test_pieces_do_not_grow(world: World) -> None:
    """A piece has the same size as before, and never spans two batches."""
    made = trainer(world, batch=7, compute=Compute(pieces=2))
    made.fit()
    batch = made.worker.draw(2, 0)
    assert len(batch.y) == 28 and batch.lengths == (7, 7, 7, 7) and batch.total == 28
    sizes = [len(piece.y) for _, piece in made.worker.pieces(batch)]
    assert sizes == [3, 4] * 4


def test_free_training_replays_the_grown_batch(world: World) -> None:
    made = trainer(world, attack=Free(replays=3), grow=(1,), grow_by=2, epochs=2)
    made.fit()
    assert made.updates == 3 * (5 + 2)
    drawn = [made.worker.draw(1, step).draws.index for step in range(6)]
    assert all(torch.equal(drawn[step], drawn[step // 3 * 3]) for step in range(6))
    assert len(torch.cat((drawn[0], drawn[3])).unique()) == 24


def test_unlabelled_images_grow_too(world: World) -> None:
    made = trainer(
        world,
        objective=TRADES(),
        unlabelled=data(12).without_labels(),
        mix=Mix(share=1 / 3, weight=0.25),
    )
    records = made.fit()
    batch = made.worker.draw(1, 0)
    labels = int((batch.y >= 0).sum())
    assert made.updates == sum(made.steps_in(epoch) for epoch in range(3)) and len(records) == 3
    assert (labels, len(batch.y)) == (8, 12)
    assert batch.total == pytest.approx(2 * (4 + 2 * 0.25)) == float(batch.weight.sum())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grow": (3, 3)}, "grow = 3, 3: must increase"),
        ({"grow": (0,)}, "grow = 0: must be at least 1"),
        ({"grow": (1,), "grow_by": 1}, "grow_by = 1: must be at least 2"),
        ({"grow": (3,)}, "train.grow = 3: must be below train.epochs = 3"),
        (
            {"grow": (1, 2), "grow_by": 3},
            "train.grow = 1, 2: the last updates would take 9 batches of 6, but an epoch has only "
            "5; grow less, or start from a smaller train.batch",
        ),
    ],
)
def test_impossible_growth_is_refused(world: World, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=re.escape(message)):
        trainer(world, **settings)


def test_the_trainer_refuses_impossible_options(world: World) -> None:
    with pytest.raises(SettingError, match="an epoch has only 5"):
        trainer(world, grow=(1,), grow_by=6)
    with pytest.raises(ValueError, match=r"bn = 'all': must be one of local, sync, ghost"):
        trainer(world, bn="all")
