"""The base classes of attacks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from dat.attacks.inputs import check_call
from dat.attacks.target import (
    GIVEN,
    AttackTarget,
    Loss,
    made_in_inference_mode,
    require_target,
    select,
    stops_when_broken,
    value,
)
from dat.core.lazy import torch
from dat.core.rng import Streams
from dat.core.settings import Settings, setting
from dat.core.threat import ThreatModel, per_sample

if TYPE_CHECKING:
    from torch import Tensor

Attempt = Callable[["Tensor"], "Tensor"]
"""One of several attacks on the same images: maps the rows to attack to adversarial examples."""


@dataclass(frozen=True, kw_only=True)
class Attack(Settings, ABC):
    """Maximizes a loss over the threat model, approximately and for each sample independently."""

    def __call__(
        self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Streams | None = None
    ) -> Tensor:
        """Return adversarial examples in the ball around `x` and in [0, 1], detached.

        By default, the random streams are those of samples 0, 1, ... with seed 0. Attacks work
        under `torch.no_grad` and `torch.inference_mode`, too.
        """
        check_call(type(self).__name__, x, threat)
        if torch.is_inference_mode_enabled() or made_in_inference_mode(loss, x):
            from dat.core.inference_mode import outside_inference_mode  # needs torch

            with outside_inference_mode():
                return self._run(loss, x, threat, draws)
        return self._run(loss, x, threat, draws)

    def _run(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Streams | None) -> Tensor:
        if draws is None:
            draws = Streams.of(0, "attack", index=torch.arange(len(x), device=x.device))
        return self.perturb(loss, x.detach(), threat, draws)

    @abstractmethod
    def perturb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Streams) -> Tensor:
        """The attack itself; `x` is detached."""

    def rounds(self) -> Sequence[Attack]:
        """A sequence of attacks equivalent to this one, between which misclassified images may be
        dropped."""
        return (self,)

    @property
    def reach(self) -> float:
        """The largest allowed distance to the image, in units of eps."""
        return 1.0

    @property
    def reads_labels(self) -> bool:
        """Whether the attack needs labels, whatever the objective's loss is."""
        return False

    def cost(self) -> int:
        """Forward passes for a sample that stays correctly classified; a backward pass counts as
        two."""
        return 0

    # How training uses the attack.

    @property
    def starts_from(self) -> str:
        """The starting point in training: `fresh`, the perturbation `carried` over from the last
        epoch, or that of the last `replay` of the batch."""
        return "fresh"

    @property
    def batch_replays(self) -> int:
        """How many times in a row a batch is trained on."""
        return 1

    @property
    def single_step(self) -> bool:
        """Whether the attack takes one step, so that catastrophic overfitting may occur."""
        return getattr(self, "steps", 0) == 1

    @property
    def early_stopping(self) -> str:
        """The setting that lets images leave the batch before the last step, with its value."""
        return ""

    def scaled(self, factor: float) -> Self:
        """This attack in a ball of `factor` times the radius: step sizes in pixels change too."""
        step_size = getattr(self, "step_size", None)
        changed: Any = {} if step_size is None else {"step_size": factor * step_size}
        return replace(self, **changed)

    def soft_labels_conflict(self) -> str:
        """Why the attack does not work with soft labels, and what to set; empty if it does."""
        if self.early_stopping:
            return f"{self.early_stopping}: mixed images are never misclassified; use none"
        loss = getattr(self, "loss", GIVEN)
        if loss in (GIVEN, "cross-entropy"):
            return ""
        return f"attack.loss = {loss}: not defined for soft labels; use given or cross-entropy"

    def sharding_conflict(self) -> str:
        """Why the attack does not work with a sharded model, and an alternative; empty if it
        does."""
        return (
            f"attack {type(self).__name__} may call the network more often on one worker than on "
            "another, and they would wait forever; use pgd, fgsm, n-fgsm, free or none"
        )


@dataclass(frozen=True, kw_only=True)
class Targeted(Attack):
    """Attacks towards each of the most likely wrong classes; the worst result counts."""

    targets: int = setting(9, "number of target classes, the most likely wrong ones first", ge=1)
    first: int = setting(1, "rank of the first target class, counted from 1", ge=1)

    @property
    def reads_labels(self) -> bool:
        return True

    def soft_labels_conflict(self) -> str:
        return f"attack {type(self).__name__} targets wrong classes, and needs one label; use pgd"

    @abstractmethod
    def perturb_towards(
        self, loss: AttackTarget, x: Tensor, threat: ThreatModel, draws: Streams
    ) -> Tensor:
        """Attack towards the classes `loss.targets`, one per image."""

    def perturb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Streams) -> Tensor:
        target = require_target(loss, type(self).__name__)
        classes = target.wrong_classes(x)
        ranks = range(self.first, min(self.first + self.targets, classes.shape[1] + 1))

        def attempt(rank: int) -> Attempt:
            return lambda rows: self.perturb_towards(
                replace(target.select(rows), targets=classes[rows, rank - 1]),
                x[rows],
                threat,
                draws.select(rows).fork("target", rank),
            )

        return worst_of(target, x, [attempt(rank) for rank in ranks])

    def rounds(self) -> Sequence[Self]:
        ranks = range(self.first, self.first + self.targets)
        return [replace(self, first=rank, targets=1) for rank in ranks]


def worst_of(loss: Loss, x: Tensor, attempts: Sequence[Attempt]) -> Tensor:
    """The worst result of several attempts for each sample: misclassified, else the highest loss.

    With `until_broken`, misclassified samples skip the remaining attempts.
    """
    rows = torch.arange(len(x), device=x.device)
    if not attempts:
        return x
    worst = attempts[0](rows)
    if len(attempts) == 1:
        return worst
    highest, broken = value(loss, worst)
    for attempt in attempts[1:]:
        if stops_when_broken(loss):
            rows = (~broken).nonzero().squeeze(1)
        if len(rows) == 0:
            break
        x_adv = attempt(rows)
        losses, wrong = value(select(loss, rows), x_adv)
        better = (wrong & ~broken[rows]) | ((wrong == broken[rows]) & (losses > highest[rows]))
        worst[rows] = torch.where(per_sample(better, x_adv), x_adv, worst[rows])
        highest[rows] = torch.where(better, losses, highest[rows])
        broken[rows] |= wrong
    return worst
