"""The threat model: which perturbations the adversary may choose, and the geometry of choosing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dat.fields import Settings, setting
from dat.rng import Draws

TINY = 1e-12


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
            delta = direction * _per_sample(one.squeeze(1) ** (1 / x.shape[1:].numel()), x)
        return self.project(x + self.eps * delta, x)

    def ascend(self, x_adv: Tensor, gradient: Tensor, step: float, x: Tensor) -> Tensor:
        """One step along the steepest ascent of this norm, then back into the ball."""
        direction = gradient.sign() if self.norm == "linf" else _unit(gradient)
        return self.project(x_adv + step * direction, x)

    def project(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """The nearest point of the ball, then of [0, 1]: as [0, 1] is a box that holds x, clipping
        moves no pixel away from x, so the result is in both."""
        if self.norm == "linf":
            inside = torch.clamp(x_adv, x - self.eps, x + self.eps)
        else:
            delta = x_adv - x
            length = _per_sample(delta.flatten(1).norm(dim=1), x)
            inside = x + delta * (self.eps / length.clamp_min(TINY)).clamp_max(1.0)
        return inside.clamp_(0.0, 1.0)

    def size(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """The norm of each sample's perturbation."""
        delta = (x_adv - x).flatten(1)
        return delta.abs().amax(1) if self.norm == "linf" else delta.norm(dim=1)


def _per_sample(values: Tensor, x: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (x.dim() - 1))


def _unit(x: Tensor) -> Tensor:
    return x / _per_sample(x.flatten(1).norm(dim=1), x).clamp_min(TINY)
