"""Model selection: the best weights of a run, by their accuracy on held-out images."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dat.attacks import PGD, Attack
from dat.core.lazy import LazyModule, torch
from dat.core.settings import setting
from dat.core.threat import ThreatModel
from dat.train.part import EpochEnd, Option, Part

if TYPE_CHECKING:
    from torch import nn

    from dat import data, evaluation
    from dat.data import ImageData
    from dat.distributed import World
    from dat.evaluation import Accuracy
    from dat.train import resharding
    from dat.train.trainer import Trainer
else:
    data, evaluation = LazyModule("dat.data"), LazyModule("dat.evaluation")
    resharding = LazyModule("dat.train.resharding")

OVERFIT = 3.0
"""Percentage points of held-out RA below the best epoch that trigger a warning."""


@dataclass(frozen=True, kw_only=True)
class Selection(Option):
    """How and how often the weights are evaluated on held-out images."""

    by: str = setting(
        "ra",
        "held-out accuracy that selects the best weights: robust (ra) or clean (ta)",
        choices=("ra", "ta"),
        key="select_by",
    )
    steps: int = setting(10, "PGD steps on the held-out images", ge=1, key="select_steps")
    every: int = setting(
        1, "epochs between evaluations on the held-out images", ge=1, key="select_every"
    )

    def build(self, trainer: Trainer) -> BestWeights:
        return BestWeights(self, trainer)


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Held-out images: either all of them on every worker, or each worker's own partitions."""

    images: ImageData
    total: int
    """Number of images on all workers together."""
    world: World
    shared: bool
    """All workers hold the same images, and each evaluates a share."""
    threat: ThreatModel
    attack: Attack
    seed: int

    @classmethod
    def of(cls, holdout: ImageData | data.Partitions, world: World, **options: Any) -> HeldOut:
        shared = not isinstance(holdout, data.Partitions)
        own = (
            holdout.share(world.size, world.rank)
            if isinstance(holdout, data.Partitions)
            else holdout
        )
        return cls(images=own, total=len(holdout), world=world, shared=shared, **options)

    def accuracy(self, model: nn.Module) -> Accuracy:
        """TA and RA over all workers' images, the same on every worker."""
        counts = evaluation.Accuracy(0, 0, 0)
        if len(self.images):
            counts = evaluation.evaluate(
                model,
                self.images,
                threat=self.threat,
                attack=self.attack,
                seed=self.seed,
                world=self.world if self.shared else self.world.single(),
            )
        if self.shared:
            return counts
        return evaluation.Accuracy(*self.world.sum(torch.tensor(counts)).tolist())

    def subset(self, count: int) -> HeldOut:
        """About `count` of the images, independent of the number of workers."""
        rows = torch.arange(len(self.images))
        every = max(1, self.total // count)
        chosen = rows[:count] if self.shared else rows[self.images.number(rows) % every == 0]
        return replace(self, images=self.images.take(chosen))


@dataclass
class Best:
    """The best weights so far, of the model and of its moving average, by name."""

    by: str = "ra"
    """Select by robust accuracy (`ra`) or by clean accuracy (`ta`)."""
    results: dict[str, tuple[Accuracy | None, int]] = field(default_factory=dict)
    """Their accuracy, if it was evaluated, and their epoch."""
    models: dict[str, nn.Module] = field(default_factory=dict)
    copy_model: Callable[[nn.Module], nn.Module] = copy.deepcopy
    """Copies a model; a sharded one stays sharded."""

    def consider(self, name: str, model: nn.Module, accuracy: Accuracy | None, epoch: int) -> bool:
        """Keep these weights if they are better, or if there is no accuracy to compare."""
        before, _ = self.results.get(name, (None, 0))
        if accuracy and before and self._rank(accuracy) <= self._rank(before):
            return False
        self.results[name] = accuracy, epoch
        self.models[name] = model if accuracy is None else self.copy_model(model)
        return True

    def _rank(self, accuracy: Accuracy) -> tuple[int, int]:
        robust, clean = accuracy.robust, accuracy.clean
        return (robust, clean) if self.by == "ra" else (clean, robust)

    def state_dict(self, live: Mapping[str, nn.Module]) -> dict[str, Any]:
        """For a checkpoint; weights that are those of the `live` model are not saved twice."""
        state = {}
        for name, (accuracy, epoch) in self.results.items():
            model = self.models[name]
            weights = None if model is live.get(name) else model.state_dict()
            counts = accuracy and list(accuracy)
            state[name] = {"accuracy": counts, "epoch": epoch, "weights": weights}
        return state

    def load_state_dict(self, state: Mapping[str, Any], live: Mapping[str, nn.Module]) -> None:
        """Restore from a checkpoint."""
        for name, saved in state.items():
            model = live[name]
            if saved["weights"] is not None:
                weights = resharding.reshard_weights(saved["weights"], model.state_dict())
                model = self.copy_model(model)
                model.load_state_dict(weights)
            accuracy = saved["accuracy"] and evaluation.Accuracy(*saved["accuracy"])
            self.results[name], self.models[name] = (accuracy, saved["epoch"]), model


class BestWeights(Part):
    """Evaluates the weights at the end of epochs, and keeps the best."""

    def __init__(self, option: Selection, trainer: Trainer) -> None:
        self.option, self.best = option, Best(option.by)
        images, attack = trainer.images.holdout, PGD(steps=option.steps)
        setup = {"threat": trainer.threat, "attack": attack, "seed": trainer.seed}
        self.holdout = None if images is None else HeldOut.of(images, trainer.world, **setup)

    def on_fit_start(self, trainer: Trainer) -> None:
        self.best.copy_model = trainer.worker.exchange.shard_copy

    def evaluate(self, trainer: Trainer, end: EpochEnd) -> None:
        """Evaluate once, even if several parts ask for it."""
        last = end.epoch + 1 == trainer.epochs
        due = self.holdout is None or last or (end.epoch + 1) % self.option.every == 0
        if due and not end.accuracies:
            end.accuracies = self.accuracies(trainer)

    def accuracies(self, trainer: Trainer) -> dict[str, Accuracy | None]:
        """Held-out accuracy of the model and of its moving average; None without such images."""
        if self.holdout is None:
            return dict.fromkeys(trainer.models())
        deployed = trainer.objective.deployed
        models = trainer.unsharded_models().items()
        return {name: self.holdout.accuracy(deployed(model)) for name, model in models}

    def on_epoch_end(self, trainer: Trainer, end: EpochEnd) -> None:
        """Keep the best weights."""
        for name, accuracy in end.accuracies.items():
            if self.best.consider(name, trainer.models()[name], accuracy, end.epoch + 1):
                trainer.notify("on_new_best", name, trainer.unsharded_models()[name])
            if accuracy is not None:
                prefix = name.rstrip("-") or "holdout"
                end.metrics |= {f"{prefix}_ta": accuracy.ta, f"{prefix}_ra": accuracy.ra}

    def warnings(self, trainer: Trainer) -> list[str]:
        """Robust overfitting (Rice et al. 2020): the last weights are less robust than the best.
        Does not apply to selection by TA, as in standard training."""
        best, last = trainer.best_accuracy(), trainer.records[-1].holdout_ra
        if self.best.by != "ra" or best is None or last is None or best.ra - last < OVERFIT:
            return []
        if trainer.collapses:
            return []
        return [
            f"robust overfitting: held-out RA was {best.ra:.1f} % after epoch "
            f"{trainer.best_epoch()} but {last:.1f} % after the last; best.safetensors holds the "
            "better weights"
        ]

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        return {"best": self.best.state_dict(trainer.models())}

    def load_state_dict(self, state: Mapping[str, Any], trainer: Trainer) -> None:
        self.best.load_state_dict(state["best"], trainer.models())
