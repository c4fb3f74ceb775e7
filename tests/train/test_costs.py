"""The costs of methods in docs/methods.md, counted in one update."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from dat.attacks import FGSM, NFGSM, PGD, YOPO, Attack, Free, NoAttack
from dat.data import ImageData
from dat.distributed import World
from dat.objectives import MART, TRADES, Adversarial, GradAlign, LogitPairing, Objective, Smooth
from dat.train import Callback, Trainer
from tests.trainers import make_trainer

IMAGES = 12


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join() as joined:
        yield joined


class Counting(nn.Module):
    """Counts the samples of forward passes, with and without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 3)
        self.gradients = self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.flatten(1)))
        if torch.is_grad_enabled():  # YOPO's inner steps stop at the first layer
            self.gradients += len(x)
        else:
            self.forwards += len(x)
        logits: Tensor = self.second(hidden)
        return logits


class ResetCounts(Callback):
    """Resets the counts after the passes that set up the engine."""

    def on_fit_start(self, trainer: Trainer) -> None:
        assert isinstance(trainer.model, Counting)
        trainer.model.gradients = trainer.model.forwards = 0


@pytest.mark.parametrize(
    ("attack", "objective", "gamma", "gradients", "forwards"),
    [
        (NoAttack(), Adversarial(), 0, 1, 0),
        (PGD(steps=5), Adversarial(), 0, 6, 0),
        (PGD(steps=5), Adversarial(clean_weight=1), 0, 7, 0),
        (PGD(steps=1, carry=True), Adversarial(), 0, 2, 0),
        (FGSM(), Adversarial(), 0, 2, 0),
        (NFGSM(), Adversarial(), 0, 2, 0),
        (Free(replays=1), Adversarial(), 0, 1, 0),
        (YOPO(steps=3, inner=3), Adversarial(), 0, 4, 0),
        (FGSM(), GradAlign(), 0, 4, 0),
        (PGD(steps=5), TRADES(), 0, 7, 1),
        (PGD(steps=5), MART(), 0, 7, 0),
        (PGD(steps=5), LogitPairing(), 0, 7, 0),
        (PGD(steps=5), Adversarial(), 0.01, 7, 0),
        (PGD(steps=5), TRADES(), 0.01, 9, 1),
        (PGD(steps=2), Smooth(copies=4), 0, 12, 0),
    ],
    ids=repr,
)
def test_an_update_costs_what_the_docs_say(
    world: World,
    attack: Attack,
    objective: Objective,
    gamma: float,
    gradients: int,
    forwards: int,
) -> None:
    random = torch.Generator().manual_seed(0)
    images = torch.rand(IMAGES, 1, 4, 4, generator=random)
    model = Counting()
    make_trainer(
        model=model,
        data=ImageData.of(images, torch.arange(IMAGES) % 3),
        attack=attack,
        objective=objective,
        awp=gamma,
        epochs=1,
        batch=IMAGES,
        world=world,
        callbacks=[ResetCounts()],
    ).fit()
    assert (model.gradients / IMAGES, model.forwards / IMAGES) == (gradients, forwards)
