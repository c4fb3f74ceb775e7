"""The threat model: which perturbations the adversary may choose, and the geometry of choosing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dat.fields import Settings, setting
from dat.native import ascend
from dat.rng import Draws

TINY = 1e-12
HUGE = 1e30


@dataclass(frozen=True, kw_only=True)
class ThreatModel(Settings):
    """Every x' with ||x' - x|| <= eps and all pixels in [0, 1]."""

    norm: str = setting("linf", "norm of the perturbation", choices=("linf", "l2"))
    eps: float = setting(8 / 255, "radius of the ball, for pixels in [0, 1]", ge=0)

    def random_start(self, x: Tensor, draws: Draws) -> Tensor:
        """A point drawn uniformly from the ball around each x, clipped to [0, 1]."""
        if self.norm == "linf":
            delta = draws.uniform(x.shape, x.dtype).mul_(2).sub_(1)
        else:  # a uniform direction; the radius is the dimension's root of a uniform number
            direction = _unit(draws.normal(x.shape, x.dtype))
            one = draws.fork("radius").uniform(torch.Size((len(x), 1)), x.dtype)
            delta = direction * per_sample(one.squeeze(1) ** (1 / x.shape[1:].numel()), x)
        return self.project(x + self.eps * delta, x)

    def random_edge(self, x: Tensor, draws: Draws) -> Tensor:
        """A random point of the ball's surface around each x, clipped to [0, 1]."""
        if self.norm == "linf":
            delta = draws.uniform(x.shape, x.dtype).mul_(2).sub_(1)
            delta /= per_sample(delta.flatten(1).abs().amax(1), x).clamp_min(TINY)
        else:
            delta = _unit(draws.normal(x.shape, x.dtype))
        return self.project(x + self.eps * delta, x)

    def ascend(self, x_adv: Tensor, gradient: Tensor, step: float | Tensor, x: Tensor) -> Tensor:
        """One step along the steepest ascent of this norm, then back into the ball; `step` may be
        one for each sample."""
        if isinstance(step, Tensor):
            step = per_sample(step, x)
        elif self.norm == "linf":
            found = ascend(x_adv.detach(), gradient, x, step, self.eps)
            if found is not None:
                return found
        direction = gradient.sign() if self.norm == "linf" else _unit(gradient)
        return self.project(x_adv + step * direction, x)

    def project(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """The nearest point of the ball, then of [0, 1]: as [0, 1] is a box that holds x, clipping
        moves no pixel away from x, so the result is in both."""
        if self.norm == "linf":
            inside = torch.clamp(x_adv, x - self.eps, x + self.eps)
        else:
            delta = x_adv - x
            length = per_sample(delta.flatten(1).norm(dim=1), x)
            inside = x + delta * (self.eps / length.clamp_min(TINY)).clamp_max(1.0)
        return inside.clamp_(0.0, 1.0)

    def size(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """The norm of each sample's perturbation."""
        return self.length(x_adv - x)

    def length(self, delta: Tensor) -> Tensor:
        """The norm of each sample."""
        flat = delta.flatten(1)
        return flat.abs().amax(1) if self.norm == "linf" else flat.norm(dim=1)

    def reach(self, x: Tensor, normal: Tensor, gap: Tensor) -> Tensor:
        """The smallest step d from x, in this norm, with normal . d = gap and x + d in [0, 1]; the
        whole way into the corner where the box is too small for that.

        Each pixel goes min(t * pace, room) in the direction that closes the gap, where room is the
        way to the box's wall and pace is 1 (linf) or |normal| (l2). What is closed is concave and
        piecewise linear in t, so Newton's method from below ends at the exact t after a few steps.
        """
        scale = normal.flatten(1).abs().amax(1).clamp_min(TINY**3)  # neither under- nor overflow
        normal, gap = normal / per_sample(scale, x), gap / scale
        way = normal.sign() * per_sample(gap.sign(), x)
        room = torch.where(way > 0, 1.0 - x, x)
        weight = normal.abs()
        pace = torch.ones_like(weight) if self.norm == "linf" else weight
        gain, wanted = (weight * pace).flatten(1), gap.abs()
        stop, most = (room / pace).flatten(1), (weight * room).flatten(1)
        t = wanted / gain.sum(1).clamp_min(TINY)
        for _ in range(x.shape[1:].numel()):
            walled = stop <= t.unsqueeze(1)
            left = wanted - (most * walled).sum(1)
            slope = (gain * ~walled).sum(1)
            further = torch.where(slope > 0, left / slope.clamp_min(TINY), float("inf"))
            if not (further > t).any():
                break
            t = torch.maximum(t, further)
        return way * torch.minimum(per_sample(t.clamp_max(HUGE), x) * pace, room)


def per_sample(values: Tensor, x: Tensor) -> Tensor:
    """One value a sample, in a shape that goes with the images'."""
    return values.reshape(-1, *[1] * (x.dim() - 1))


def _unit(x: Tensor) -> Tensor:
    return x / per_sample(x.flatten(1).norm(dim=1), x).clamp_min(TINY)
