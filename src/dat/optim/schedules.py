"""Learning-rate schedules: functions from the progress of a run to a factor in [0, 1] on the peak
rate.

Progress is `epoch` = finished epochs + finished steps / steps per epoch, out of `epochs`, which
include the warm-up. Schedules are stateless, so nothing has to be saved for a resumed run.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from dat.core.lazy import torch
from dat.core.settings import SettingError, Settings, setting

PAPER_MILESTONES = {30: (20, 25, 28), 100: (75, 90, 95)}
"""For 30 epochs, ImageNet ('Training details'); for 100 epochs, CIFAR-10 (the paper's code)."""


@dataclass(frozen=True, kw_only=True)
class Schedule(Settings, ABC):
    """A linear warm-up to the peak, followed by the shape of the subclass."""

    warmup: float = setting(0.0, "warm-up epochs, counted as part of the run", ge=0)
    warmup_by: str = setting(
        "epoch",
        "epoch: warm-up epoch k of W has k/W of the rate (the paper); "
        "step: the rate rises with every step, from 0",
        choices=("epoch", "step"),
    )

    def __call__(self, epoch: float, epochs: int) -> float:
        """The factor on the peak rate for the next step."""
        if epoch < self.warmup:
            progress = math.floor(epoch) + 1 if self.warmup_by == "epoch" else epoch
            return min(progress / self.warmup, 1.0)
        return self.shape(epoch, epochs)

    @abstractmethod
    def shape(self, epoch: float, epochs: int) -> float:
        """The factor after the warm-up."""

    def progress(self, epoch: float, epochs: int) -> float:
        """The finished share of the run after the warm-up."""
        length = epochs - self.warmup
        return min((epoch - self.warmup) / length, 1.0) if length > 0 else 1.0


@dataclass(frozen=True, kw_only=True)
class Piecewise(Schedule):
    """Multiplies the rate by `factor` at each milestone, counted from the start of the run.

    The paper adds the warm-up to its 30 epochs: that is 35 epochs, warmup 5, milestones 25, 30, 33.
    """

    milestones: tuple[int, ...] = setting(
        (),
        "epochs at which the rate drops; empty: the paper's, 20, 25, 28 of 30 and 75, 90, 95 of "
        "100 epochs, otherwise 75, 90, 95 %",
        ge=1,
    )
    factor: float = setting(
        0.1, "factor by which the rate is multiplied at each milestone", gt=0, le=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if list(self.milestones) != sorted(set(self.milestones)):
            raise SettingError(f"milestones = {self.milestones}: must increase")
        if self.milestones and self.milestones[0] < self.warmup:
            raise SettingError(f"milestones = {self.milestones}: must come after the warm-up")

    def shape(self, epoch: float, epochs: int) -> float:
        passed = sum(epoch >= milestone for milestone in self._milestones(epochs))
        return self.factor**passed

    def _milestones(self, epochs: int) -> tuple[float, ...]:
        # multiply before dividing, so that 90 % of 70 epochs is exactly 63
        by_percent = tuple(epochs * percent / 100 for percent in (75, 90, 95))
        return self.milestones or PAPER_MILESTONES.get(epochs, by_percent)


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Cosine annealing from the peak to `final` (Loshchilov and Hutter 2017, no restarts)."""

    final: float = setting(0.0, "factor at the end", ge=0, le=1)

    def shape(self, epoch: float, epochs: int) -> float:
        cosine = (1 + math.cos(math.pi * self.progress(epoch, epochs))) / 2
        return self.final + (1 - self.final) * cosine


@dataclass(frozen=True, kw_only=True)
class Cyclic(Schedule):
    """A triangle from 0 to the peak to 0, as in Fast AT (Wong et al. 2020, arXiv 2001.03994)."""

    peak_at: float = setting(0.5, "share of the run after which the rate peaks", gt=0, lt=1)

    def shape(self, epoch: float, epochs: int) -> float:
        progress = self.progress(epoch, epochs)
        return min(progress / self.peak_at, (1 - progress) / (1 - self.peak_at))


@dataclass(frozen=True, kw_only=True)
class OneCycle(Schedule):
    """From a fraction of the peak up to it, and down to a far smaller one (Smith and Topin 2018,
    arXiv 1708.07120), as in torch's OneCycleLR; the momentum stays constant."""

    peak_at: float = setting(0.3, "share of the run after which the rate peaks", gt=0, lt=1)
    anneal: str = setting("cosine", "shape of both phases", choices=("cosine", "linear"))
    start: float = setting(0.04, "factor at the start", ge=0, le=1)
    final: float = setting(4e-6, "factor at the end", ge=0, le=1)

    def shape(self, epoch: float, epochs: int) -> float:
        progress = self.progress(epoch, epochs)
        if progress < self.peak_at:
            return self._between(self.start, 1.0, progress / self.peak_at)
        return self._between(1.0, self.final, (progress - self.peak_at) / (1 - self.peak_at))

    def _between(self, first: float, last: float, progress: float) -> float:
        share = (1 - math.cos(math.pi * progress)) / 2 if self.anneal == "cosine" else progress
        return first + (last - first) * share


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """The peak rate throughout."""

    def shape(self, epoch: float, epochs: int) -> float:
        return 1.0


def set_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of each group to `factor` times its peak: the rate with which it was
    created."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
