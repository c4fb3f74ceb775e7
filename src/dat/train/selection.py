"""The best weights of a run, by what they do on held-out images."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from dat.attacks import Attack
from dat.comm import World
from dat.data import ImageData, Parts
from dat.evaluation import Accuracy, evaluate
from dat.threat import ThreatModel


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Held-out images: a set that all workers have, or what each has of the parts it owns."""

    images: ImageData
    total: int
    """At all workers together."""
    world: World
    shared: bool
    """All workers have the same, and judge a share each."""
    threat: ThreatModel
    attack: Attack
    seed: int

    @classmethod
    def of(cls, held: ImageData | Parts, world: World, **options: Any) -> HeldOut:
        mine = held.share(world.size, world.rank) if isinstance(held, Parts) else held
        shared = isinstance(held, ImageData)
        return cls(images=mine, total=len(held), world=world, shared=shared, **options)

    def accuracy(self, model: nn.Module) -> Accuracy:
        """TA and RA over all workers' images; every worker gets the same."""
        found = Accuracy(0, 0, 0)
        if len(self.images):
            found = evaluate(
                model,
                self.images,
                threat=self.threat,
                attack=self.attack,
                seed=self.seed,
                world=self.world if self.shared else self.world.alone(),
            )
        return found if self.shared else Accuracy(*self.world.sum(torch.tensor(found)).tolist())

    def some(self, count: int) -> HeldOut:
        """About so many of them, the same whoever has them."""
        rows = torch.arange(len(self.images))
        every = max(1, self.total // count)
        few = rows[:count] if self.shared else rows[self.images.number(rows) % every == 0]
        return replace(self, images=self.images.take(few))


@dataclass
class Best:
    """The best so far, of the raw weights and of the averaged ones, by their names."""

    by: str = "ra"
    """What is highest: robust accuracy, or `ta`."""
    found: dict[str, tuple[Accuracy | None, int]] = field(default_factory=dict)
    """What they did, if it was measured, and after which epoch."""
    models: dict[str, nn.Module] = field(default_factory=dict)
    copied: Callable[[nn.Module], nn.Module] = copy.deepcopy
    """How weights are put by; those of a sharded model in parts."""

    def consider(self, name: str, model: nn.Module, accuracy: Accuracy | None, epoch: int) -> bool:
        """Keep these weights if they are better, or if nobody measures."""
        before, _ = self.found.get(name, (None, 0))
        if accuracy and before and self._rank(accuracy) <= self._rank(before):
            return False
        self.found[name] = accuracy, epoch
        self.models[name] = model if accuracy is None else self.copied(model)
        return True

    def _rank(self, accuracy: Accuracy) -> tuple[int, int]:
        robust, clean = accuracy.robust, accuracy.clean
        return (robust, clean) if self.by == "ra" else (clean, robust)

    def state(self, live: dict[str, nn.Module]) -> dict[str, Any]:
        """For a checkpoint; of what is the `live` model itself, no second copy."""
        kept = {}
        for name, (accuracy, epoch) in self.found.items():
            model = self.models[name]
            weights = None if model is live.get(name) else model.state_dict()
            told = accuracy and list(accuracy)
            kept[name] = {"accuracy": told, "epoch": epoch, "weights": weights}
        return kept

    def restore(self, state: dict[str, Any], live: dict[str, nn.Module]) -> None:
        """From a checkpoint."""
        for name, kept in state.items():
            model = live[name]
            if kept["weights"] is not None:
                model = self.copied(model)
                model.load_state_dict(kept["weights"])
            accuracy = kept["accuracy"] and Accuracy(*kept["accuracy"])
            self.found[name], self.models[name] = (accuracy, kept["epoch"]), model
