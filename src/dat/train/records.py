"""What is told of a run while it goes on: its steps, its epochs, and who wants to hear of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from dat.comm import Traffic, World
from dat.train.sentinel import Collapse
from dat.train.step import StepReport

if TYPE_CHECKING:
    from dat.train.trainer import Trainer


class EpochRecord(NamedTuple):
    """What an epoch came to, over all workers."""

    epoch: int
    lr: float
    loss: float
    train_ra: float
    """Accuracy on the training's own adversarial examples."""
    seconds: float
    """T: training time, the slowest worker's, evaluation not included."""
    comm_seconds: float
    """C: time with an exchange under way, part of T."""
    exposed_seconds: float
    """The part of C that the backward pass did not hide."""
    mb_per_step: float
    """Megabytes that all workers together send in an iteration."""
    mb_busiest: float
    """Megabytes that the busiest worker sends in an iteration."""
    mb_epoch: float
    """Megabytes that all workers together sent."""
    attack_seconds: float = 0.0
    """The part of T in which a worker attacks, on average."""
    update_seconds: float = 0.0
    """The part of T in which a worker updates the weights, the exposed part of C included."""
    batch: int | None = None
    """The global batch of its updates."""
    holdout_ta: float | None = None
    holdout_ra: float | None = None
    ema_ta: float | None = None
    ema_ra: float | None = None
    trust_ratios: dict[str, float] | None = None
    """LALR's ratio of each adapted layer in the last step."""
    mb_between: float = 0.0
    """Of `mb_per_step`, the megabytes that leave a node."""


class Listener:
    """Told of a run's progress; every method may be left out."""

    def started(self, trainer: Trainer) -> None: ...
    def step_ended(self, trainer: Trainer, epoch: int, report: StepReport) -> None: ...
    def best_found(self, trainer: Trainer, name: str, model: nn.Module) -> None: ...
    def epoch_ended(self, trainer: Trainer, record: EpochRecord) -> None: ...
    def collapsed(self, trainer: Trainer, collapse: Collapse) -> None: ...
    def left_out_step(self, trainer: Trainer, reason: str, count: int) -> None: ...
    def ended(self, trainer: Trainer) -> None: ...


@dataclass
class Tally:
    """What an epoch has come to so far."""

    step: int = 0
    taken: int = 0
    """Steps that were not left out."""
    loss: float = 0.0
    right: float = 0.0
    traffic: Traffic = field(default_factory=lambda: Traffic(0, 0.0, 0.0))
    attack: float = 0.0
    update: float = 0.0
    """Seconds of this worker's."""
    seconds: float = 0.0
    """Before an interruption."""
    since: float = field(default_factory=time.perf_counter)

    def start(self) -> None:
        """From here on, time counts."""
        self.since = time.perf_counter()

    @property
    def elapsed(self) -> float:
        return self.seconds + time.perf_counter() - self.since

    def costs(self, world: World, steps: int) -> dict[str, float]:
        """Time and traffic of the epoch's steps, over all workers."""
        traffic = self.traffic
        mine = (
            *(self.elapsed, traffic.busy, traffic.exposed, traffic.sent),
            *(self.attack, self.update, traffic.between),
        )
        everyone = world.gather(torch.tensor(mine, dtype=torch.float64))
        slowest, sent = everyone.amax(0).tolist(), everyone[:, 3] / steps / 1e6
        return {
            "seconds": slowest[0],
            "comm_seconds": slowest[1],
            "exposed_seconds": slowest[2],
            "mb_per_step": float(sent.sum()),
            "mb_busiest": float(sent.max()),
            "mb_epoch": float(sent.sum()) * steps,
            "attack_seconds": float(everyone[:, 4].mean()),
            "update_seconds": float(everyone[:, 5].mean()),
            "mb_between": float(everyone[:, 6].sum()) / steps / 1e6,
        }

    def add(self, report: StepReport) -> None:
        self.step += 1
        self.taken += 1
        self.loss += report.loss
        self.right += report.accuracy
        self.traffic = self.traffic.plus(report.traffic)

    def add_times(self, seconds: dict[str, float]) -> None:
        self.attack += seconds["attack"]
        self.update += seconds["update"]
