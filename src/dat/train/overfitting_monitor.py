"""Detects catastrophic overfitting (Wong et al. 2020).

Training with a single attack step can collapse within an epoch: the network learns to withstand
that one step and nothing else, RA under PGD drops to zero, and the training metrics look better
than ever. Therefore, the monitor attacks held-out images with PGD after every epoch.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dat.attacks import ATTACKS, Attack
from dat.core.lazy import LazyModule
from dat.core.settings import setting
from dat.train.averaging import AveragedWeights
from dat.train.part import EpochEnd, Option, Part
from dat.train.selection import BestWeights

if TYPE_CHECKING:
    from dat.train import resharding
    from dat.train.trainer import Trainer
else:
    resharding = LazyModule("dat.train.resharding")


@dataclass(frozen=True, kw_only=True)
class OverfittingMonitor(Option):
    """When RA counts as collapsed, and what to do about it."""

    action: str = setting(
        "warn",
        "if single-step training collapses (catastrophic overfitting): off, do nothing; warn; "
        "stop; or rescue: return to the last good epoch and continue with the attack train.rescue",
        choices=("off", "warn", "stop", "rescue"),
        key="sentinel",
    )
    rescue: str = setting(
        "n-fgsm", "the attack to continue with after a collapse", choices=("n-fgsm", "pgd")
    )
    images: int = 256
    """Held-out images to attack in epochs without model selection."""
    drop: float = 0.5
    """RA below this share of the highest RA so far is a collapse."""
    least: float = 10.0
    """Unless RA has reached this value, in percent, it cannot collapse."""

    @property
    def rewinds(self) -> bool:
        """Whether a collapsed epoch is undone."""
        return self.action in ("stop", "rescue")

    def watches(self, attack: Attack) -> bool:
        """Whether to monitor this attack: only single-step training collapses."""
        return self.action != "off" and attack.single_step

    def collapsed(self, history: Sequence[float]) -> bool:
        """Whether the last RA is a collapse, compared to those before."""
        best = max(history[:-1], default=0.0)
        return best >= self.least and history[-1] < self.drop * best

    def build(self, trainer: Trainer) -> RobustnessHistory:
        return RobustnessHistory(self)


class Collapse(NamedTuple):
    """A collapse of RA, and the action taken."""

    epoch: int
    before: float
    """The highest RA so far, in percent, on held-out images."""
    now: float
    action: str
    back_to: int | None = None
    """The last good epoch, if the run returns to it."""

    def __str__(self) -> str:
        text = (
            f"epoch {self.epoch}: RA under PGD fell from {self.before:.1f} to {self.now:.1f} % on "
            "held-out images: catastrophic overfitting"
        )
        if self.action == "stop":
            return f"{text}; stopping with the weights of epoch {self.back_to}"
        if self.back_to is not None:
            return f"{text}; returning to epoch {self.back_to} to continue with another attack"
        if self.action == "rescue":
            return f"{text}, for the second time; use attack.name=pgd"
        return f"{text}; use attack.name=n-fgsm or pgd, or train.sentinel=rescue"


@dataclass
class Snapshot:
    """The state of training after an epoch, to return to."""

    epoch: int
    weights: dict[str, Any]
    optimizer: dict[str, Any]
    averages: dict[str, Any] | None

    @classmethod
    def of(cls, epoch: int, trainer: Trainer) -> Snapshot:
        ema = trainer.parts.one(AveragedWeights).ema
        state = ema.state_dict() if ema else None
        optimizer = trainer.worker.optimizer.state_dict()
        return cls(epoch, *copy.deepcopy((trainer.model.state_dict(), optimizer, state)))

    def restore(self, trainer: Trainer) -> None:
        ema = trainer.parts.one(AveragedWeights).ema
        trainer.model.load_state_dict(self.weights)
        trainer.worker.optimizer.load_state_dict(copy.deepcopy(self.optimizer))
        if ema and self.averages:
            ema.load_state_dict(self.averages)


class RobustnessHistory(Part):
    """Tracks RA over the epochs, and keeps a snapshot of the last good one."""

    def __init__(self, option: OverfittingMonitor) -> None:
        self.option = option
        self.ra_history: list[float] = []
        """RA after each epoch, in percent."""
        self.collapses: list[Collapse] = []
        self.good: Snapshot | None = None
        self.rescued = False

    def evaluate(self, trainer: Trainer, end: EpochEnd) -> None:
        """Detect a collapse; all workers come to the same result."""
        selection = trainer.parts.one(BestWeights)
        if selection.holdout is None or not self.option.watches(trainer.worker.inner.attack):
            return
        selection.evaluate(trainer, end)
        accuracy = end.accuracies.get("")
        if accuracy is None:
            model = trainer.objective.deployed(trainer.unsharded_models()[""])
            accuracy = selection.holdout.subset(self.option.images).accuracy(model)
        collapse = self.record(end.epoch + 1, accuracy.ra, trainer)
        if collapse:
            trainer.notify("on_collapse", collapse)
            if collapse.back_to is not None:
                self._rewind(trainer, collapse.back_to)
                end.rolled_back, end.stop = True, collapse.action == "stop"

    def record(self, epoch: int, ra: float, trainer: Trainer) -> Collapse | None:
        """Add the RA of an epoch, counted from 1. Returns a collapse, or takes a snapshot of a good
        epoch."""
        self.ra_history.append(ra)
        if not self.option.collapsed(self.ra_history):
            if self.option.rewinds and not self.collapses:  # a run is rescued only once
                self.good = Snapshot.of(epoch, trainer)
            return None
        back_to = self.good.epoch if self.good else None
        collapse = Collapse(epoch, max(self.ra_history[:-1]), ra, self.option.action, back_to)
        self.collapses.append(collapse)
        return collapse

    def _rewind(self, trainer: Trainer, epoch: int) -> None:
        """Return to the last good epoch, to stop there or to continue with another attack. This
        happens only once in a run."""
        assert self.good is not None
        self.good.restore(trainer)
        self.good = None
        del self.ra_history[-1]
        trainer.worker.exchange.reset_error_feedback()
        trainer.gather_weights()
        selection = trainer.parts.one(BestWeights)
        if self.option.action == "rescue":
            self._rescue(trainer)
        elif not selection.best.results:  # no epoch was evaluated so far
            end = EpochEnd(epoch - 1, selection.accuracies(trainer))
            selection.on_epoch_end(trainer, end)

    def _rescue(self, trainer: Trainer) -> None:
        self.rescued = True
        trainer.use_attack(ATTACKS[self.option.rescue]())

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        return {
            "seen": self.ra_history,
            "collapses": [list(collapse) for collapse in self.collapses],
            "rescued": self.rescued,
            "good": asdict(self.good) if self.good else None,
        }

    def load_state_dict(self, state: Mapping[str, Any], trainer: Trainer) -> None:
        self.ra_history[:] = state["seen"]
        self.collapses[:] = [Collapse(*collapse) for collapse in state["collapses"]]
        self.good = self._resharded(state["good"], trainer) if state["good"] else None
        if state["rescued"]:
            self._rescue(trainer)

    def _resharded(self, saved: dict[str, Any], trainer: Trainer) -> Snapshot:
        averages, averaged = saved["averages"], trainer.parts.one(AveragedWeights)
        if averages and averaged.ema:
            averages = averaged.resharded(averages)
        return Snapshot(
            epoch=saved["epoch"],
            weights=resharding.reshard_weights(saved["weights"], trainer.model.state_dict()),
            optimizer=resharding.reshard_optimizer(saved["optimizer"], trainer.worker.optimizer),
            averages=averages,
        )
