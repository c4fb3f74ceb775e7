"""What every objective is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dat.attacks import Loss
from dat.fields import SettingError, Settings
from dat.rng import Draws
from dat.threat import ThreatModel

Network = Callable[[Tensor], Tensor]
"""Images in [0, 1] to logits: a module, or a module whose gradients are exchanged."""


class Team(Protocol):
    """Workers that have the same images and share out what is to be done with each."""

    @property
    def size(self) -> int: ...

    def share(self, count: int) -> range:
        """Which of `count` things are this worker's."""

    def spread(self, x: Tensor) -> Tensor:
        """`x` itself; its gradient is summed over the team."""

    def total(self, values: Tensor) -> Tensor:
        """The sum of the team's values; each worker's gradient is that of its own."""

    def logsumexp(self, values: Tensor) -> Tensor:
        """log of the sum of exp over the team's values, with gradients as above."""


class Alone:
    """A team of one."""

    size = 1

    def share(self, count: int) -> range:
        return range(count)

    def spread(self, x: Tensor) -> Tensor:
        return x

    def total(self, values: Tensor) -> Tensor:
        return values

    def logsumexp(self, values: Tensor) -> Tensor:
        return values


@dataclass(frozen=True)
class Batch:
    """Images, labels, and the random streams that an objective draws from."""

    x: Tensor
    y: Tensor
    draws: Draws
    threat: ThreatModel = field(default_factory=ThreatModel)
    """What the adversary may do to these images."""
    team: Team = field(default_factory=Alone)
    weight: Tensor | float = 1.0
    """How much each sample counts."""
    total: float = 1.0
    """How much the samples of all workers count together."""
    lengths: tuple[int, ...] = ()
    """Of a batch that has grown, the images of each batch in it."""
    _noise: dict[int, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, x: Tensor, y: Tensor, *, threat: ThreatModel | None = None, seed: int = 0) -> Batch:
        """Samples numbered 0, 1, ..."""
        index = torch.arange(len(x), device=x.device)
        draws = Draws.of(seed, "objective", index=index)
        return cls(x, y, draws, ThreatModel() if threat is None else threat)

    def pick(self, rows: Tensor | slice) -> Batch:
        """Some of the samples, with their own streams."""
        weight = self.weight[rows] if isinstance(self.weight, Tensor) else self.weight
        draws = self.draws.pick(rows)
        some = replace(self, x=self.x[rows], y=self.y[rows], draws=draws, weight=weight)
        return replace(some, lengths=(), _noise={})

    def noise(self, copy: int) -> Tensor:
        """Standard normal noise for the copy of that number of every image. It is drawn once: the
        attack and the update that follows see the same."""
        if copy not in self._noise:
            streams = self.draws.fork("copy", copy)
            self._noise[copy] = streams.normal(self.x.shape, self.x.dtype)
        return self._noise[copy]


class Outcome(NamedTuple):
    """What a batch came to."""

    loss: Tensor
    """The objective of each sample; of a team, each worker's share of it."""
    logits: Tensor
    """The logits of each adversarial example."""


def both(model: Network, x: Tensor, x_adv: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of clean and of adversarial images, from one forward pass."""
    clean, adversarial = model(torch.cat((x, x_adv))).chunk(2)
    return clean, adversarial


@dataclass(frozen=True, kw_only=True)
class Objective(Settings, ABC):
    """One choice of loss, phi and lambda."""

    def check_labels(self) -> None:
        """Refuse images without labels."""
        raise SettingError(
            "objective.name: only trades learns from images without labels; label them first "
            "(dat label), or use trades"
        )

    def check_team(self, size: int) -> None:
        """Refuse a team that cannot share out the work on an image."""
        if size > 1:
            raise SettingError(
                f"train.team = {size}: only noisy copies of an image can be shared out "
                "(objective.name smooth, stability); use 1"
            )

    def check_patience(self) -> None:
        """Refuse attacks that images leave one by one."""

    @abstractmethod
    def phi(self, model: Network, batch: Batch) -> Loss:
        """What the inner oracle ascends at the batch, as a function of the adversarial images."""

    @abstractmethod
    def loss(self, model: Network, batch: Batch, x_adv: Tensor) -> Outcome:
        """lambda * loss(x) + phi(x_adv), per sample. It calls `model` once: two forwards before one
        backward would break batch normalisation under DDP, and one larger forward is faster."""

    def deployed(self, model: nn.Module) -> nn.Module:
        """What is to be measured: the model as it will be used."""
        return model
