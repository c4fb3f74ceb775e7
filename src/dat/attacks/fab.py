"""FAB (Croce & Hein 2020): the nearest point across a decision boundary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dat.attacks.base import Targeted
from dat.attacks.target import AttackTarget, ValueAndGrad, value, value_and_grad
from dat.core.lazy import torch
from dat.core.losses import targeted_margin
from dat.core.rng import Streams
from dat.core.settings import setting
from dat.core.threat import ThreatModel, per_sample

if TYPE_CHECKING:
    from torch import Tensor

MIN_LENGTH = 1e-8


@dataclass(frozen=True, kw_only=True)
class FAB(Targeted):
    """Steps onto the linearised decision boundary with a class, and back towards the image once the
    boundary is crossed. Deterministic: it starts at the image itself."""

    steps: int = setting(100, "steps per target", ge=1)
    overshoot: float = setting(1.05, "eta: overshoot of a step beyond the boundary", ge=1)
    pull: float = setting(
        0.1, "alpha: largest weight of the step that starts from the image", ge=0, le=1
    )
    retreat: float = setting(
        0.9, "beta: share of the perturbation kept after crossing the boundary", gt=0, le=1
    )

    def perturb_towards(
        self, loss: AttackTarget, x: Tensor, threat: ThreatModel, draws: Streams
    ) -> Tensor:
        loss = replace(loss, loss=targeted_margin)
        result = x.clone()
        rows = torch.arange(len(x), device=x.device)
        x_adv, best, distance = x, x, x.new_full((len(x),), float("inf"))
        for _ in range(self.steps):
            x_adv = self._step(value_and_grad(loss, x_adv), x, x_adv, threat)
            _, crossed = value(loss, x_adv)
            length = torch.where(crossed, threat.size(x_adv, x), float("inf"))
            best = torch.where(per_sample(length < distance, x), x_adv, best)
            distance = torch.minimum(length, distance)
            x_adv = torch.where(per_sample(crossed, x), x + self.retreat * (x_adv - x), x_adv)
            done = distance <= threat.eps
            if loss.until_broken and done.any():
                result[rows[done]] = best[done]
                active = (~done).nonzero().squeeze(1)
                rows, x, x_adv, best, distance = (
                    tensor[active] for tensor in (rows, x, x_adv, best, distance)
                )
                loss = loss.select(active)
                if len(rows) == 0:
                    break
        if not loss.until_broken:  # project points that crossed outside the ball, or never crossed
            crossed = per_sample(distance.isfinite(), x)
            result[rows] = threat.project(torch.where(crossed, best, x_adv), x)
        return result

    def _step(self, value: ValueAndGrad, x: Tensor, x_adv: Tensor, threat: ThreatModel) -> Tensor:
        """The weighted mean of two steps onto the linearised boundary: from x_adv and from x."""
        slope = (value.gradient * (x_adv - x)).flatten(1).sum(1)
        from_adv = threat.step_to_hyperplane(x_adv, value.gradient, -value.loss)
        from_x = threat.step_to_hyperplane(x, value.gradient, slope - value.loss)
        length_adv, length_x = (
            threat.length(step).clamp_min(MIN_LENGTH) for step in (from_adv, from_x)
        )
        weight = per_sample((length_adv / (length_adv + length_x)).clamp_max(self.pull), x)
        point_adv, point_x = x_adv + self.overshoot * from_adv, x + self.overshoot * from_x
        return ((1 - weight) * point_adv + weight * point_x).clamp_(0.0, 1.0)

    def cost(self) -> int:
        return 4 * self.targets * self.steps
