"""Projected gradient ascent (Madry et al. 2018): the attack of DAT-PGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dat.attacks.base import Attack, Attempt, worst_of
from dat.attacks.target import (
    GIVEN,
    LOSSES,
    AttackTarget,
    Loss,
    require_target,
    select,
    value_and_grad,
    with_loss,
)
from dat.core.deprecation import RenamedAttribute
from dat.core.lazy import torch
from dat.core.rng import Streams
from dat.core.settings import SettingError, setting
from dat.core.threat import ThreatModel

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PGD(Attack):
    """`steps` projected ascent steps; the worst of several restarts counts for each sample.

    In training, it may start from the perturbations of the last epoch (ATTA, Zheng et al. 2020),
    and stop soon after an image is misclassified (friendly adversarial training, Zhang et al.
    2020).
    """

    steps: int = setting(10, "ascent steps k", ge=1)
    step_size: float | None = setting(
        None, "step size in pixels; none: 2.5 eps / steps, or 0.5 eps / steps with carry", gt=0
    )
    random_start: bool = setting(True, "start from a random point of the ball")
    restarts: int = setting(1, "independent runs; the highest loss is kept", ge=1)
    loss: str = setting(
        GIVEN, "loss to maximize; given: that of the objective", choices=(GIVEN, *LOSSES)
    )
    carry: bool = setting(
        False, "in training, start from the perturbation of the same image in the last epoch"
    )
    reset: int = setting(10, "with carry, epochs after which to start afresh; 0: never", ge=0)
    patience: int | None = setting(
        None,
        "further steps for an image that is misclassified before it leaves the batch; none: all "
        "steps",
        ge=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.carry and self.restarts > 1:
            raise SettingError(
                f"restarts = {self.restarts}: carry keeps one perturbation per image; use "
                "restarts = 1, or carry = false"
            )

    def perturb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Streams) -> Tensor:
        loss = with_loss(loss, self.loss, "pgd.loss")

        def attempt(restart: int) -> Attempt:
            forked = draws.fork("restart", restart) if restart else draws

            def run(rows: Tensor) -> Tensor:
                start = self.start(x[rows], threat, forked.select(rows))
                return self._ascend(select(loss, rows), start, x[rows], threat)

            return run

        return worst_of(loss, x, [attempt(restart) for restart in range(self.restarts)])

    def start(self, x: Tensor, threat: ThreatModel, draws: Streams) -> Tensor:
        """The starting point of the first step."""
        return threat.random_start(x, draws) if self.random_start else x

    def onward(self, loss: Loss, x_adv: Tensor, x: Tensor, threat: ThreatModel) -> Tensor:
        """Run all steps, starting from `x_adv`."""
        loss = with_loss(loss, self.loss, "pgd.loss")
        return self._ascend(loss, x_adv, x.detach(), threat)

    def effective_step_size(self, threat: ThreatModel) -> float:
        """The step size, or its default for this threat model."""
        if self.step_size is not None:
            return self.step_size
        return (0.5 if self.carry else 2.5) * threat.eps / self.steps

    pace = RenamedAttribute("effective_step_size")

    def _ascend(self, loss: Loss, x_adv: Tensor, x: Tensor, threat: ThreatModel) -> Tensor:
        if self.patience is not None:
            return self._with_patience(require_target(loss, "pgd.patience"), x_adv, x, threat)
        step_size = self.effective_step_size(threat)
        for _ in range(self.steps):
            x_adv = threat.ascend(x_adv, value_and_grad(loss, x_adv).gradient, step_size, x)
        return x_adv

    def _with_patience(
        self, loss: AttackTarget, x_adv: Tensor, x: Tensor, threat: ThreatModel
    ) -> Tensor:
        """An image that is misclassified and out of patience stays at its current point."""
        result, rows = x_adv.clone(), torch.arange(len(x), device=x.device)
        patience = torch.full_like(rows, self.patience or 0)
        step_size = self.effective_step_size(threat)
        for _ in range(self.steps):
            value = value_and_grad(loss, x_adv)
            active = (~value.misclassified | (patience > 0)).nonzero().squeeze(1)
            patience = (patience - value.misclassified.long())[active]
            rows, x, loss = rows[active], x[active], loss.select(active)
            if len(rows) == 0:
                break
            x_adv = threat.ascend(x_adv[active], value.gradient[active], step_size, x)
            result[rows] = x_adv
        return result

    def rounds(self) -> Sequence[Attack]:
        return [replace(self, restarts=1)] * self.restarts

    @property
    def reads_labels(self) -> bool:
        return self.loss != GIVEN or self.patience is not None

    def cost(self) -> int:
        return 3 * self.steps * self.restarts

    @property
    def starts_from(self) -> str:
        return "carried" if self.carry else "fresh"

    @property
    def early_stopping(self) -> str:
        return "" if self.patience is None else f"attack.patience = {self.patience}"

    def sharding_conflict(self) -> str:
        if self.patience is None and self.restarts == 1:
            return ""
        return (
            "attack.patience and attack.restarts let images leave the batch, and a worker without "
            "images would block the others; use patience none and restarts 1"
        )
