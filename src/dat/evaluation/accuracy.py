"""Test accuracy (TA) and robust accuracy (RA).

Every sample is judged by itself: its random numbers come from the seed and its number, its verdict
is a bit, and the workers' bits are added up as integers. So neither the number of workers nor the
batch size has a say in the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dat.attacks import PGD, Attack, attack_mode
from dat.comm import World
from dat.data import ImageData
from dat.losses import cross_entropy
from dat.rng import Draws
from dat.threat import ThreatModel


class Accuracy(NamedTuple):
    """Counts over a whole set."""

    images: int
    clean: int
    """Right without an attack."""
    robust: int
    """Right without an attack and after every one that was tried."""

    @property
    def ta(self) -> float:
        """Test accuracy in percent."""
        return 100.0 * self.clean / self.images

    @property
    def ra(self) -> float:
        """Robust accuracy in percent."""
        return 100.0 * self.robust / self.images


def evaluate(
    model: nn.Module,
    data: ImageData,
    *,
    threat: ThreatModel,
    attack: Attack | None = None,
    restarts: int = 1,
    batch: int = 256,
    seed: int = 0,
    world: World | None = None,
    progress: Callable[[int], None] = lambda samples: None,
) -> Accuracy:
    """TA and RA of a model that maps images in [0, 1] to logits; the default attack is PGD-20.

    A sample is robust when it survives each of `restarts` independent attacks. Called by every
    worker of `world`; each judges its share and all get the same counts.
    """
    if restarts < 1 or batch < 1:
        raise ValueError(f"restarts = {restarts}, batch = {batch}: must be at least 1")
    if world is None:  # the group that this joins is there for later calls, and closed at exit
        parameter = next(model.parameters(), None)
        world = World.join(device="auto" if parameter is None else str(parameter.device))
    attack = PGD(steps=20) if attack is None else attack
    shares = torch.arange(len(data)).tensor_split(world.size)
    verdicts = torch.zeros(2, dtype=torch.int64)
    with attack_mode(model, "eval"):
        for rows in shares[world.rank].split(batch):
            x, y = data.batch(rows, world.device)
            draws = Draws.of(seed, "evaluate", index=rows.to(world.device))
            clean, robust = _judge(model, x, y, threat, attack, restarts, draws)
            verdicts += torch.stack((clean.sum(), robust.sum())).cpu()
            progress(len(rows))
    clean_count, robust_count = world.sum(verdicts).tolist()
    return Accuracy(len(data), clean_count, robust_count)


def _judge(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: ThreatModel,
    attack: Attack,
    restarts: int,
    draws: Draws,
) -> tuple[Tensor, Tensor]:
    """Who is right on the clean image, and who still is after all attacks."""
    clean = _right(model, x, y)
    robust = clean.clone()
    for restart in range(restarts):
        alive = robust.nonzero().squeeze(1)  # who is wrong already needs no further attack
        if len(alive) == 0:
            break
        labels = y[alive]

        def loss(images: Tensor, labels: Tensor = labels) -> Tensor:
            return cross_entropy(model(images), labels)

        x_adv = attack(loss, x[alive], threat, draws.pick(alive).fork("restart", restart))
        robust[alive] = _right(model, x_adv, labels)
    return clean, robust


@torch.no_grad()
def _right(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits: Tensor = model(x)
    return (logits.argmax(1) == y) & logits.isfinite().all(1)  # NaN is no answer
