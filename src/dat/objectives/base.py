"""The base class of objectives, and the batch they work on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from dat.attacks import Loss
from dat.core.deprecation import RenamedAttribute
from dat.core.lazy import torch
from dat.core.rng import Streams
from dat.core.settings import SettingError, Settings
from dat.core.short_repr import short_repr
from dat.core.threat import ThreatModel

if TYPE_CHECKING:
    from torch import Tensor, nn

Network = Callable[["Tensor"], "Tensor"]
"""Maps images in [0, 1] to logits: a module, or a wrapped one whose gradients are exchanged."""


class SubgroupLike(Protocol):
    """Workers with the same images, which share the work on each image."""

    @property
    def size(self) -> int: ...

    def share(self, count: int) -> range:
        """This worker's share of `count` items."""

    def spread(self, x: Tensor) -> Tensor:
        """The identity; the gradient is summed over the subgroup."""

    def total(self, values: Tensor) -> Tensor:
        """The sum over the subgroup; each worker gets the gradient of its own values."""

    def logsumexp(self, values: Tensor) -> Tensor:
        """The logsumexp over the subgroup; each worker gets the gradient of its own values."""


class NoSubgroup:
    """A subgroup of one worker."""

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
    """Images, labels and the random streams of an objective."""

    x: Tensor
    y: Tensor
    """A class per image, or soft labels: weights of the classes, of shape (n, classes)."""
    draws: Streams
    threat: ThreatModel = field(default_factory=ThreatModel)
    """The allowed perturbations."""
    subgroup: SubgroupLike = field(default_factory=NoSubgroup)
    """The workers that share the work on these images."""
    weight: Tensor | float = 1.0
    """The weight of each sample in the mean loss."""
    total: float = 1.0
    """The sum of the weights of all workers."""
    lengths: tuple[int, ...] = ()
    """With a batch schedule, the sizes of the batches that were merged into this one."""
    _noise: dict[int, Tensor] = field(default_factory=dict, repr=False)

    team = RenamedAttribute("subgroup")

    __repr__ = short_repr

    @classmethod
    def of(cls, x: Tensor, y: Tensor, *, threat: ThreatModel | None = None, seed: int = 0) -> Batch:
        """A batch of the samples 0, 1, ..."""
        index = torch.arange(len(x), device=x.device)
        draws = Streams.of(seed, "objective", index=index)
        return cls(x, y, draws, ThreatModel() if threat is None else threat)

    def select(self, rows: Tensor | slice) -> Batch:
        """A subset of the samples, with their streams."""
        weight = self.weight[rows] if isinstance(self.weight, torch.Tensor) else self.weight
        draws = self.draws.select(rows)
        subset = replace(self, x=self.x[rows], y=self.y[rows], draws=draws, weight=weight)
        return replace(subset, lengths=(), _noise={})

    pick = RenamedAttribute("select")

    def replaced(self, x: Tensor, y: Tensor) -> Batch:
        """The batch with other images and labels."""
        return replace(self, x=x, y=y, _noise={})

    def noise(self, copy: int) -> Tensor:
        """Standard normal noise for the given noisy copy of every image, generated once, so that
        the attack and the update use the same."""
        if copy not in self._noise:
            forked = self.draws.fork("copy", copy)
            self._noise[copy] = forked.normal(self.x.shape, self.x.dtype)
        return self._noise[copy]


class Outcome(NamedTuple):
    """The result of an objective for a batch."""

    loss: Tensor
    """The loss of each sample; in a subgroup, this worker's share of it."""
    logits: Tensor
    """The logits of the adversarial examples."""

    def __repr__(self) -> str:
        return short_repr(self)


def clean_and_adversarial(model: Network, x: Tensor, x_adv: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of clean and adversarial images, from one forward pass."""
    clean, adversarial = model(torch.cat((x, x_adv))).chunk(2)
    return clean, adversarial


@dataclass(frozen=True, kw_only=True)
class Objective(Settings, ABC):
    """A choice of loss, phi and lambda in equation (2)."""

    second_derivatives: ClassVar[bool] = False
    """Whether the loss contains gradients."""

    def check_labels(self) -> None:
        """Raise if the objective cannot train on images without labels."""
        raise SettingError(
            "objective.name: only trades learns from images without labels; label them first "
            "(dat label), or use trades"
        )

    def check_subgroup(self, size: int) -> None:
        """Raise if `size` workers cannot share the work on an image."""
        if size > 1:
            raise SettingError(
                f"train.team = {size}: workers can only share the noisy copies of an image "
                "(objective.name smooth, stability); use 1"
            )

    check_team = RenamedAttribute("check_subgroup")

    def check_patience(self) -> None:
        """Raise if images must not leave the attack one by one."""

    def soft_labels_conflict(self) -> str:
        """Why the objective does not work with soft labels, and an alternative; empty if it
        does."""
        return ""

    def sharding_conflict(self) -> str:
        """Why the objective does not work with a sharded model, and an alternative; empty if it
        does."""
        return ""

    @abstractmethod
    def phi(self, model: Network, batch: Batch) -> Loss:
        """The loss that the attack maximizes, as a function of the adversarial images."""

    @abstractmethod
    def loss(self, model: Network, batch: Batch, x_adv: Tensor) -> Outcome:
        """lambda * loss(x) + phi(x_adv) for each sample.

        Implementations call `model` once: two forward passes before one backward pass would break
        batch normalization under DDP, and one larger pass is faster.
        """

    def deployed(self, model: nn.Module) -> nn.Module:
        """The model as it is evaluated and deployed, e.g. smoothed."""
        return model
