"""Attacks that tell what was done with them, and networks that the tests of evaluation share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dat.attacks import APGD, FAB, FGSM, PGD, Attack, Loss, NoAttack, Square, TargetedAPGD
from dat.attacks.suites import Suite, suite_of
from dat.core.rng import Streams
from dat.core.threat import ThreatModel
from dat.data import ImageData

CPU = torch.device("cpu")
THREAT = ThreatModel(eps=0.08)
"""At this radius the perceptron loses about half of its images."""
THREATS = (THREAT, ThreatModel(norm="l2", eps=0.5))


def short() -> Suite:
    """Every kind of attack, a few steps of each, the weakest first: nearly all find something."""
    return suite_of(
        "short",
        {
            "square": Square(queries=20),
            "fgsm": FGSM(step_ratio=0.6),
            "pgd": PGD(steps=2, step_size=0.03, restarts=2),
            "apgd-t": TargetedAPGD(steps=1, targets=2),
            "apgd-ce": APGD(steps=1),
            "fab-t": FAB(steps=3, targets=3),
        },
    )


class ProgressRecorder:
    """Notes the progress that it is shown."""

    def __init__(self) -> None:
        self.shown: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.shown.append((done, total))

    @property
    def done(self) -> list[int]:
        return [done for done, _ in self.shown]

    @property
    def total(self) -> list[int]:
        return [total for _, total in self.shown]


class Stopped(Exception):
    """What ends an evaluation in the middle."""


@dataclass(frozen=True, kw_only=True)
class Spy(Attack):
    """Another attack, and a note of the images' numbers, batch by batch. It may blacken some of the
    images itself, and end everything when it is given one batch more than it is to bear."""

    inner: Attack = field(default_factory=NoAttack)
    blackened: tuple[int, ...] = ()
    given: list[list[int]] = field(default_factory=list, repr=False)
    bears: int | None = field(default=None, repr=False)

    def perturb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Streams) -> Tensor:
        if len(self.given) == self.bears:
            raise Stopped
        self.given.append(draws.index.tolist())
        hit = torch.isin(draws.index, torch.tensor(self.blackened))
        x_adv = self.inner(loss, x, threat, draws)
        return torch.where(hit.reshape(-1, 1, 1, 1), torch.zeros_like(x), x_adv)

    def cost(self) -> int:
        return self.inner.cost()

    @property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.given]

    @property
    def everybody(self) -> list[int]:
        return sorted(number for batch in self.given for number in batch)


class Brightness(nn.Module):
    """Class 1 for images that are not black; in training mode, class 2 for all."""

    def forward(self, x: Tensor) -> Tensor:
        bright = (x.flatten(1).sum(1) > 0).long()
        return F.one_hot(torch.full_like(bright, 2) if self.training else bright, 3).float()


def white(*labels: int) -> ImageData:
    """White images, of which `Brightness` gets those right that are of class 1."""
    return ImageData.of(torch.ones(len(labels), 1, 2, 2), torch.tensor(labels), classes=3)


class Steadfast(nn.Module):
    """Says class 1 to everything, with a gradient that leads nowhere."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).mean(1, keepdim=True) * 0.01 + torch.tensor([0.0, 9.0, 1.0, 2.0, 3.0])


class Noisy(nn.Module):
    """Another network, on images with noise that is new at every look."""

    def __init__(self, net: nn.Module, std: float = 0.05) -> None:
        super().__init__()
        self.net, self.std = net, std

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + self.std * torch.randn_like(x))  # type: ignore[no-any-return]


def everything(data: ImageData) -> tuple[Tensor, Tensor]:
    return data.batch(torch.arange(len(data)), CPU)


@torch.no_grad()
def right(model: nn.Module, data: ImageData) -> Tensor:
    x, y = everything(data)
    return model(x).argmax(1) == y  # type: ignore[no-any-return]
