"""eps and step sizes that grow during the first epochs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dat.attacks import ATTACKS, FGSM, PGD, YOPO, Free
from dat.core.settings import SettingError
from dat.core.threat import ThreatModel
from dat.data import ImageData
from dat.distributed import World
from dat.optim import SGD
from dat.train import Trainer
from tests.trainers import make_trainer

EPS = 0.2


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join(device="cpu", threads=1) as joined:
        yield joined


def trainer(world: World, **settings: Any) -> Trainer:
    images = torch.rand(24, 1, 4, 4, generator=torch.Generator().manual_seed(0)) / 2 + 0.25
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    made = make_trainer(
        model=model,
        data=ImageData.of(images, torch.arange(24) % 3),
        threat=ThreatModel(eps=EPS),
        optimizer=SGD(lr=0.01),
        epochs=4,
        batch=6,
        world=world,
        **settings,
    )
    made._join()
    return made


def test_eps_grows_with_every_step(world: World) -> None:
    made = trainer(world, eps_warmup=2.0)
    eps = [made.worker.draw(epoch, step).threat.eps for epoch in range(4) for step in range(4)]
    assert eps == pytest.approx([EPS * min(number, 8) / 8 for number in range(1, 17)])
    assert eps[7:] == [EPS] * 9
    assert trainer(world).worker.draw(0, 0).threat is made.threat or made.threat.eps == EPS


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize(
    "attack", [PGD(steps=3), PGD(steps=2, step_size=0.15), FGSM(), YOPO(step_size=0.1), Free()]
)
def test_perturbations_have_the_size_of_the_current_eps(
    world: World, attack: Any, norm: str
) -> None:
    made = trainer(world, eps_warmup=2.0, attack=attack)
    threat = ThreatModel(norm=norm, eps=EPS)
    made.worker.inner.threat = threat
    worker = made.worker
    for epoch in (0, 1):
        batch = worker.draw(epoch, 0)
        eps = batch.threat.eps
        x_adv = worker.perturb(batch, epoch, 0).detach()
        assert made.threat.size(x_adv, batch.x).max() <= eps + 1e-6
    if not isinstance(attack, Free):
        assert made.threat.size(x_adv, batch.x).max() > 0.9 * eps


def test_step_sizes_in_pixels_grow_in_proportion(world: World) -> None:
    made = trainer(world, eps_warmup=2.0, attack=PGD(steps=1, step_size=0.08, random_start=False))
    for step in range(3):
        batch = made.worker.draw(0, step)
        moved = made.threat.size(made.worker.perturb(batch, 0, step), batch.x)
        torch.testing.assert_close(moved, torch.full((6,), 0.08 * (step + 1) / 8))


@pytest.mark.parametrize("name", ATTACKS)
def test_a_scaled_attack_keeps_everything_but_step_sizes_in_pixels(name: str) -> None:
    attack = ATTACKS[name]()
    assert attack.scaled(0.5) == attack
    if hasattr(attack, "step_size"):
        long, short = (ATTACKS[name].read({"step_size": size}) for size in (0.3, 0.15))
        assert long.scaled(0.5) == short


@pytest.mark.parametrize("attack", [PGD(steps=1, carry=True), Free(replays=2)])
def test_attacks_with_a_memory_train(world: World, attack: Any) -> None:
    made = trainer(world, eps_warmup=3.0, attack=attack)
    assert len(made.fit()) == 4


def test_warmup_must_end_before_the_run(world: World) -> None:
    with pytest.raises(SettingError, match=r"eps_warmup = 5: must be at most train.epochs = 4"):
        trainer(world, eps_warmup=5.0)
