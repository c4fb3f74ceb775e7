"""Catastrophic overfitting (Wong et al. 2020), seen at once.

Training with one attack step can collapse within an epoch: the network learns to withstand that
step and nothing else, RA under PGD falls to nothing, and the training's own figures look better
than ever. So after every epoch PGD is tried on some held-out images.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from dat.attacks import FGSM, NFGSM, Attack, Free
from dat.optim import EMA

SINGLE_STEP = (FGSM, NFGSM, Free)
ACTIONS = ("off", "warn", "stop", "rescue")


@dataclass(frozen=True, kw_only=True)
class Sentinel:
    """What is looked at, and what is done when it collapses."""

    action: str = "warn"
    """`warn` says so, `stop` ends the run, `rescue` goes back to the last good epoch and goes on
    with `rescue`; `off` does not look."""
    rescue: Attack = field(default_factory=NFGSM)
    images: int = 256
    """So many of the held-out images are probed."""
    drop: float = 0.5
    """A fall below this share of the highest RA so far is a collapse."""
    least: float = 10.0
    """Below this RA, in percent, there is nothing yet that could collapse."""

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ValueError(f"action = {self.action!r}: must be one of {', '.join(ACTIONS)}")

    @property
    def goes_back(self) -> bool:
        """Whether a collapsed epoch is undone."""
        return self.action in ("stop", "rescue")

    def watches(self, attack: Attack) -> bool:
        """Only single-step training collapses like that."""
        single = isinstance(attack, SINGLE_STEP) or getattr(attack, "steps", 0) == 1
        return self.action != "off" and single

    def collapsed(self, seen: Sequence[float]) -> bool:
        """Whether the last RA is a collapse, given those before."""
        best = max(seen[:-1], default=0.0)
        return best >= self.least and seen[-1] < self.drop * best


class Collapse(NamedTuple):
    """What was seen."""

    epoch: int
    before: float
    """The highest RA so far, in percent, on the images that are probed."""
    now: float
    action: str
    back_to: int | None = None
    """The last good epoch, if the run goes back to it."""

    def __str__(self) -> str:
        text = (
            f"epoch {self.epoch}: RA under PGD fell from {self.before:.1f} to {self.now:.1f} % on "
            "held-out images: catastrophic overfitting"
        )
        if self.action == "stop":
            return f"{text}; stopping with the weights of epoch {self.back_to}"
        if self.back_to is not None:
            return f"{text}; going back to epoch {self.back_to}, and on with another attack"
        if self.action == "rescue":
            return f"{text}, for the second time; use attack.name=pgd"
        return f"{text}; use attack.name=n-fgsm or pgd, or train.sentinel=rescue"


@dataclass
class Snapshot:
    """A moment of the training that one can go back to."""

    epoch: int
    weights: dict[str, Any]
    optimizer: dict[str, Any]
    averages: dict[str, Any] | None

    @classmethod
    def of(
        cls, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer, averages: EMA | None
    ) -> Snapshot:
        state = averages.state_dict() if averages else None
        return cls(epoch, *copy.deepcopy((model.state_dict(), optimizer.state_dict(), state)))

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, averages: EMA | None
    ) -> None:
        model.load_state_dict(self.weights)
        optimizer.load_state_dict(copy.deepcopy(self.optimizer))
        if averages and self.averages:
            averages.load_state_dict(self.averages)


Moment = tuple[nn.Module, torch.optim.Optimizer, EMA | None]
"""The model, its optimizer and its averaged weights, as they are now."""


class Watch:
    """What a sentinel has seen of a run, and the last good moment of it."""

    def __init__(self, sentinel: Sentinel) -> None:
        self.sentinel = sentinel
        self.seen: list[float] = []
        """RA after each epoch, in percent."""
        self.collapses: list[Collapse] = []
        self.good: Snapshot | None = None

    def look(self, epoch: int, ra: float, now: Moment) -> Collapse | None:
        """After an epoch, counted from 1: whether it collapsed; if not, one can go back to it."""
        self.seen.append(ra)
        if not self.sentinel.collapsed(self.seen):
            if self.sentinel.goes_back and not self.collapses:  # what collapses again is beyond it
                self.good = Snapshot.of(epoch, *now)
            return None
        back_to = self.good.epoch if self.good else None
        collapse = Collapse(epoch, max(self.seen[:-1]), ra, self.sentinel.action, back_to)
        self.collapses.append(collapse)
        return collapse

    def go_back(self, now: Moment) -> None:
        """To the last good moment; only once, as the run takes another way from there."""
        assert self.good is not None
        self.good.restore(*now)
        self.good = None
        del self.seen[-1]
