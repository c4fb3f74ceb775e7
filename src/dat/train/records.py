"""The metrics of an epoch: running totals, and the final record."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch

from dat.core.short_repr import short_repr
from dat.distributed import Traffic, World
from dat.train.step import StepReport


class EpochRecord(NamedTuple):
    """The metrics of a finished epoch, over all workers."""

    epoch: int
    lr: float
    loss: float
    train_ra: float
    """Accuracy on the adversarial examples of training."""
    seconds: float
    """T: training time of the slowest worker, without evaluation."""
    comm_seconds: float
    """C: time with a gradient exchange in flight, part of T."""
    exposed_seconds: float
    """The part of C that is not hidden behind the backward pass."""
    mb_per_step: float
    """Megabytes sent per iteration by all workers together."""
    mb_busiest: float
    """Megabytes sent per iteration by the busiest worker."""
    mb_epoch: float
    """Megabytes sent in the epoch by all workers together."""
    attack_seconds: float = 0.0
    """The part of T spent on the attack, averaged over workers."""
    update_seconds: float = 0.0
    """The part of T spent on the update, including the exposed part of C, averaged over workers."""
    batch: int | None = None
    """The global batch size of an update."""
    holdout_ta: float | None = None
    holdout_ra: float | None = None
    ema_ta: float | None = None
    ema_ra: float | None = None
    trust_ratios: dict[str, float] | None = None
    """LALR's trust ratio of each adapted layer in the last step."""
    mb_between: float = 0.0
    """The part of `mb_per_step` that is sent between nodes."""
    loss_scale: float | None = None
    """In float16, the scale of the loss at the end of the epoch."""
    skipped_steps: int | None = None
    """In float16, the number of steps that were skipped after an overflow."""

    def __repr__(self) -> str:
        return short_repr(self)


@dataclass
class EpochTally:
    """Running totals of the current epoch."""

    step: int = 0
    taken: int = 0
    """Steps that were not skipped."""
    loss: float = 0.0
    right: float = 0.0
    """Sum of the steps' accuracies."""
    traffic: Traffic = field(default_factory=lambda: Traffic(0, 0.0, 0.0))
    attack: float = 0.0
    update: float = 0.0
    """This worker's seconds in attacks and in updates."""
    seconds: float = 0.0
    """Seconds before the run was interrupted."""
    since: float = field(default_factory=time.perf_counter)

    def start(self) -> None:
        """Start the clock."""
        self.since = time.perf_counter()

    @property
    def elapsed(self) -> float:
        return self.seconds + time.perf_counter() - self.since

    def costs(self, world: World, steps: int) -> dict[str, float]:
        """Time and traffic of the epoch's steps, over all workers."""
        traffic = self.traffic
        own = (
            *(self.elapsed, traffic.busy, traffic.exposed, traffic.sent),
            *(self.attack, self.update, traffic.inter_node),
        )
        gathered = world.gather(torch.tensor(own, dtype=torch.float64))
        slowest, sent = gathered.amax(0).tolist(), gathered[:, 3] / steps / 1e6
        return {
            "seconds": slowest[0],
            "comm_seconds": slowest[1],
            "exposed_seconds": slowest[2],
            "mb_per_step": float(sent.sum()),
            "mb_busiest": float(sent.max()),
            "mb_epoch": float(sent.sum()) * steps,
            "attack_seconds": float(gathered[:, 4].mean()),
            "update_seconds": float(gathered[:, 5].mean()),
            "mb_between": float(gathered[:, 6].sum()) / steps / 1e6,
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

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "taken": self.taken,
            "loss": self.loss,
            "right": self.right,
            "traffic": list(self.traffic),
            "seconds": self.elapsed if self.step else 0.0,
            "attack": self.attack,
            "update": self.update,
        }

    @classmethod
    def of(cls, state: dict[str, Any]) -> Self:
        """Restore from a checkpoint."""
        return cls(**state | {"traffic": Traffic(*state["traffic"])})
