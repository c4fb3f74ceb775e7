"""Whom an attack is set against, and what it sees there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dat.losses import cross_entropy, dlr, margin
from dat.stages import stage

Loss = Callable[[Tensor], Tensor]
"""What an attack ascends: a batch of images to one loss each."""
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": cross_entropy,
    "margin": margin,
    "dlr": dlr,
}
GIVEN = "given"


@dataclass(frozen=True)
class Victim:
    """A network and the right answers: a loss that also tells whether an attack has won."""

    model: Callable[[Tensor], Tensor]
    labels: Tensor
    loss: Callable[..., Tensor] = cross_entropy
    """Of logits, labels and, where there are any, targets."""
    targets: Tensor | None = None
    """What else the loss must know of each image: a wrong class to aim at, or the clean logits."""
    until_broken: bool = False
    """One wrong answer is all that is wanted: an image that gives it is left alone from then on.
    Else the loss is to be as high as it gets."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.see(x)[0]

    def see(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and whether the answer is wrong."""
        logits = self.model(x)
        aims = () if self.targets is None else (self.targets,)
        return self.loss(logits, self.labels, *aims), self.wrong(logits)

    def wrong(self, logits: Tensor) -> Tensor:
        """NaN is no answer."""
        logits = logits.detach()
        return (logits.argmax(1) != self.labels) | ~logits.isfinite().all(1)

    def pick(self, rows: Tensor) -> Victim:
        """The same for some of the images."""
        targets = None if self.targets is None else self.targets[rows]
        return replace(self, labels=self.labels[rows], targets=targets)

    @torch.no_grad()
    def wrong_classes(self, x: Tensor) -> Tensor:
        """The wrong classes at x, the likeliest first."""
        logits = self.model(x).scatter(1, self.labels.unsqueeze(1), float("-inf"))
        return logits.argsort(dim=1, descending=True, stable=True)[:, :-1]


class View(NamedTuple):
    """What there is to see at a batch of images."""

    loss: Tensor
    gradient: Tensor
    broken: Tensor


def look(loss: Loss, x: Tensor, *, draws: int = 1) -> View:
    """One forward and one backward pass, or the mean of several where the network is random.

    `autograd.grad` leaves the parameters' own gradients alone.
    """
    views = [_look_once(loss, x) for _ in range(draws)]
    if draws == 1:
        return views[0]
    losses, gradients, verdicts = zip(*views, strict=True)
    return View(sum(losses) / draws, sum(gradients) / draws, verdicts[-1])


@torch.enable_grad()
def _look_once(loss: Loss, x: Tensor) -> View:
    x = x.detach().requires_grad_(True)
    with stage("forward"):
        value, broken = see(loss, x)
    with stage("backward"):
        (gradient,) = torch.autograd.grad(value.sum(), x)
    return View(value.detach(), gradient, broken)


@torch.no_grad()
def glance(loss: Loss, x: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and verdict, without a gradient."""
    return see(loss, x)


def see(loss: Loss, x: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and verdict; a bare loss knows of no right answer, so nothing is ever broken."""
    if isinstance(loss, Victim):
        return loss.see(x)
    return loss(x), torch.zeros(len(x), dtype=torch.bool, device=x.device)


def victim(loss: Loss, attack: str) -> Victim:
    """The loss as a victim, for an attack that must know the right answers."""
    if not isinstance(loss, Victim):
        raise ValueError(
            f"{attack}: needs the network and the labels; give it dat.Victim(model, y)"
        )
    return loss


def ascended(loss: Loss, name: str, attack: str) -> Loss:
    """The given loss, or another one on the same logits."""
    if name == GIVEN:
        return loss
    return replace(victim(loss, attack), loss=LOSSES[name], targets=None)


def settled(loss: Loss) -> bool:
    """Whether a broken image may be left alone."""
    return isinstance(loss, Victim) and loss.until_broken


def narrowed(loss: Loss, rows: Tensor) -> Loss:
    """The loss for some of the images; a bare loss cannot tell them apart, and is only ever asked
    for all of them."""
    return loss.pick(rows) if isinstance(loss, Victim) else loss
