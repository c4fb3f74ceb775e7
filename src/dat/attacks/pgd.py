"""Projected gradient ascent (Madry et al. 2018): the oracle of DAT-PGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dat.attacks.base import Attack, Attempt, worst_of
from dat.attacks.victim import GIVEN, LOSSES, Loss, Victim, ascended, look, narrowed, victim
from dat.fields import SettingError, setting
from dat.rng import Draws
from dat.threat import ThreatModel


@dataclass(frozen=True, kw_only=True)
class PGD(Attack):
    """`steps` projected ascent steps; of several restarts, each sample keeps its worst.

    In training they may begin where those of the epoch before ended (ATTA, Zheng et al. 2020), and
    end soon after they have won (friendly adversarial training, Zhang et al. 2020).
    """

    steps: int = setting(10, "ascent steps k", ge=1)
    step_size: float | None = setting(
        None, "step size in pixels; none is 2.5 eps / steps, with carry 0.5 eps / steps", gt=0
    )
    random_start: bool = setting(True, "start from a random point of the ball")
    restarts: int = setting(1, "independent runs; the highest loss is kept", ge=1)
    loss: str = setting(
        GIVEN, "what to ascend; given is the objective's own", choices=(GIVEN, *LOSSES)
    )
    carry: bool = setting(
        False, "in training, start where the attack on the same image ended an epoch ago"
    )
    reset: int = setting(10, "with carry, epochs after which to start anew; 0 is never", ge=0)
    patience: int | None = setting(
        None,
        "steps that an image which is misclassified still takes, then it leaves the batch; none: "
        "all steps",
        ge=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.carry and self.restarts > 1:
            raise SettingError(
                f"restarts = {self.restarts}: only one perturbation of an image is carried; use "
                "restarts = 1, or carry = false"
            )

    def perturb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Draws) -> Tensor:
        goal = self.goal(loss)

        def attempt(number: int) -> Attempt:
            streams = draws.fork("restart", number) if number else draws

            def run(rows: Tensor) -> Tensor:
                start = self.start(x[rows], threat, streams.pick(rows))
                return self._ascend(narrowed(goal, rows), start, x[rows], threat)

            return run

        return worst_of(goal, x, [attempt(number) for number in range(self.restarts)])

    def start(self, x: Tensor, threat: ThreatModel, draws: Draws) -> Tensor:
        """Where the first step begins."""
        return threat.random_start(x, draws) if self.random_start else x

    def onward(self, loss: Loss, x_adv: Tensor, x: Tensor, threat: ThreatModel) -> Tensor:
        """All steps, from these points."""
        return self._ascend(self.goal(loss), x_adv, x.detach(), threat)

    def goal(self, loss: Loss) -> Loss:
        """What is ascended."""
        return ascended(loss, self.loss, "pgd.loss")

    def pace(self, threat: ThreatModel) -> float:
        """The length of a step."""
        if self.step_size is not None:
            return self.step_size
        return (0.5 if self.carry else 2.5) * threat.eps / self.steps

    def _ascend(self, loss: Loss, x_adv: Tensor, x: Tensor, threat: ThreatModel) -> Tensor:
        if self.patience is not None:
            return self._until_won(victim(loss, "pgd.patience"), x_adv, x, threat)
        for _ in range(self.steps):
            x_adv = threat.ascend(x_adv, look(loss, x_adv).gradient, self.pace(threat), x)
        return x_adv

    def _until_won(self, loss: Victim, x_adv: Tensor, x: Tensor, threat: ThreatModel) -> Tensor:
        """Who is misclassified where it stands, and out of patience, stays there."""
        found, rows = x_adv.clone(), torch.arange(len(x), device=x.device)
        patience = torch.full_like(rows, self.patience or 0)
        for _ in range(self.steps):
            seen = look(loss, x_adv)
            going = (~seen.broken | (patience > 0)).nonzero().squeeze(1)
            patience = (patience - seen.broken.long())[going]
            rows, x, loss = rows[going], x[going], loss.pick(going)
            if len(rows) == 0:
                break
            x_adv = threat.ascend(x_adv[going], seen.gradient[going], self.pace(threat), x)
            found[rows] = x_adv
        return found

    def rounds(self) -> Sequence[Attack]:
        return [replace(self, restarts=1)] * self.restarts

    @property
    def reads_labels(self) -> bool:
        return self.loss != GIVEN or self.patience is not None

    def cost(self) -> int:
        return 3 * self.steps * self.restarts
