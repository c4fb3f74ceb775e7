"""FAB (Croce & Hein 2020): the nearest point beyond a decision boundary."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dat.attacks.base import Targeted
from dat.attacks.victim import Victim, View, glance, look
from dat.fields import setting
from dat.losses import lead
from dat.rng import Draws
from dat.threat import ThreatModel, per_sample

NEAR = 1e-8


@dataclass(frozen=True, kw_only=True)
class FAB(Targeted):
    """Steps to where the linearised boundary with a class is, and back towards the image once it is
    crossed. It starts at the image itself, so nothing in it is random."""

    steps: int = setting(100, "steps for each target", ge=1)
    overshoot: float = setting(1.05, "eta: how far beyond the boundary a step aims", ge=1)
    pull: float = setting(0.1, "alpha: at most so much of a step starts from the image", ge=0, le=1)
    retreat: float = setting(0.9, "beta: what is kept of a perturbation that crossed", gt=0, le=1)

    def aimed(self, loss: Victim, x: Tensor, threat: ThreatModel, draws: Draws) -> Tensor:
        loss = replace(loss, loss=lead)
        found = x.clone()
        rows = torch.arange(len(x), device=x.device)
        at, best, distance = x, x, x.new_full((len(x),), float("inf"))
        for _ in range(self.steps):
            at = self._step(look(loss, at), x, at, threat)
            _, crossed = glance(loss, at)
            length = torch.where(crossed, threat.size(at, x), float("inf"))
            best = torch.where(per_sample(length < distance, x), at, best)
            distance = torch.minimum(length, distance)
            at = torch.where(per_sample(crossed, x), x + self.retreat * (at - x), at)
            done = distance <= threat.eps
            if loss.until_broken and done.any():
                found[rows[done]] = best[done]
                left = (~done).nonzero().squeeze(1)
                rows, x, at, best, distance = (v[left] for v in (rows, x, at, best, distance))
                loss = loss.pick(left)
                if len(rows) == 0:
                    break
        if not loss.until_broken:  # what crossed too far away, or never, goes as far as it may
            crossed = per_sample(distance.isfinite(), x)
            found[rows] = threat.project(torch.where(crossed, best, at), x)
        return found

    def _step(self, seen: View, x: Tensor, at: Tensor, threat: ThreatModel) -> Tensor:
        """A mean of two steps to the linearised boundary, from here and from the image."""
        slope = (seen.gradient * (at - x)).flatten(1).sum(1)
        here = threat.reach(at, seen.gradient, -seen.loss)
        home = threat.reach(x, seen.gradient, slope - seen.loss)
        far, near = (threat.length(step).clamp_min(NEAR) for step in (here, home))
        share = per_sample((far / (far + near)).clamp_max(self.pull), x)
        point = (1 - share) * (at + self.overshoot * here) + share * (x + self.overshoot * home)
        return point.clamp_(0.0, 1.0)

    def cost(self) -> int:
        return 4 * self.targets * self.steps
