"""The threat model: the allowed perturbations, and the geometry of their norm."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dat.core.deprecation import RenamedAttribute
from dat.core.lazy import torch
from dat.core.rng import Streams
from dat.core.settings import SettingError, Settings, setting
from dat.kernels.native import ascend

if TYPE_CHECKING:
    from torch import Tensor

TINY = 1e-12
HUGE = 1e30
TOLERANCE = 1e-6
UNLIMITED = 100.0
"""Up to here, an l2 radius may exceed the distance between images, as a way to say unlimited."""


@dataclass(frozen=True, kw_only=True)
class ThreatModel(Settings):
    """All x' with ||x' - x|| <= eps and pixels in [0, 1]."""

    norm: str = setting("linf", "norm of the perturbation", choices=("linf", "l2"))
    eps: float = setting(8 / 255, "radius of the ball, for pixels in [0, 1]", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm == "linf" and self.eps > 1:
            raise SettingError(
                f"eps = {self.eps:g}: exceeds the pixel range [0, 1]; {self._scaled()}"
            )

    def scaled(self, factor: float) -> ThreatModel:
        """The ball of `factor` times the radius, which may exceed the pixel range: attacks such as
        N-FGSM leave the ball on their way."""
        ball = copy.copy(self)
        object.__setattr__(ball, "eps", factor * self.eps)  # not validated as a user's is
        return ball

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise if the ball around an image of this shape contains all images by far, as it does
        when eps is meant for pixels in 0..255."""
        farthest = math.sqrt(math.prod(shape))
        if self.norm == "l2" and self.eps > max(UNLIMITED, farthest * (1 + TOLERANCE)):
            raise SettingError(
                f"threat.eps = {self.eps:g}: exceeds the l2 distance between any two images of "
                f"shape {tuple(shape)}, {farthest:.4g}, for pixels in [0, 1]; "
                f"{self._scaled()}"
            )

    def _scaled(self) -> str:
        return f"did you mean {self.eps:g}/255?" if self.eps <= 255 else "divide it by 255"

    def random_start(self, x: Tensor, draws: Streams) -> Tensor:
        """A uniform random point of the ball around each x, clipped to [0, 1]."""
        if self.norm == "linf":
            delta = draws.uniform(x.shape, x.dtype).mul_(2).sub_(1)
        else:  # a uniform direction, and in d dimensions a radius of u ** (1 / d)
            direction = _unit(draws.normal(x.shape, x.dtype))
            u = draws.fork("radius").uniform(torch.Size((len(x), 1)), x.dtype)
            delta = direction * per_sample(u.squeeze(1) ** (1 / x.shape[1:].numel()), x)
        return self.project(x + self.eps * delta, x)

    def random_boundary_start(self, x: Tensor, draws: Streams) -> Tensor:
        """A random point on the surface of the ball around each x, clipped to [0, 1]."""
        if self.norm == "linf":
            delta = draws.uniform(x.shape, x.dtype).mul_(2).sub_(1)
            delta /= per_sample(delta.flatten(1).abs().amax(1), x).clamp_min(TINY)
        else:
            delta = _unit(draws.normal(x.shape, x.dtype))
        return self.project(x + self.eps * delta, x)

    def ascend(self, x_adv: Tensor, gradient: Tensor, step: float | Tensor, x: Tensor) -> Tensor:
        """One steepest-ascent step for this norm, projected back into the ball.

        `step` is one step size, or a tensor with one per sample.
        """
        if isinstance(step, torch.Tensor):
            step = per_sample(step, x)
        elif self.norm == "linf":
            stepped = ascend(x_adv.detach(), gradient, x, step, self.eps)
            if stepped is not None:
                return stepped
        direction = gradient.sign() if self.norm == "linf" else _unit(gradient)
        return self.project(x_adv + step * direction, x)

    def project(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """Project onto the ball, then onto [0, 1]. The box contains x, so clipping moves no pixel
        away from x, and the result is in both."""
        if self.norm == "linf":
            inside = torch.clamp(x_adv, x - self.eps, x + self.eps)
        else:
            delta = x_adv - x
            norm = per_sample(delta.flatten(1).norm(dim=1), x)
            inside = x + delta * (self.eps / norm.clamp_min(TINY)).clamp_max(1.0)
        return inside.clamp_(0.0, 1.0)

    def size(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """The norm of each sample's perturbation."""
        return self.length(x_adv - x)

    def length(self, delta: Tensor) -> Tensor:
        """The norm of each sample's delta."""
        flat = delta.flatten(1)
        return flat.abs().amax(1) if self.norm == "linf" else flat.norm(dim=1)

    def step_to_hyperplane(self, x: Tensor, normal: Tensor, gap: Tensor) -> Tensor:
        """The smallest step d in this norm with normal . d = gap and x + d in [0, 1]; where the box
        does not reach the hyperplane, the step to its nearest corner.

        Each pixel moves by min(t * speed, room) in the direction that closes the gap, where room is
        its distance to the bound of [0, 1] and speed is 1 (linf) or |normal| (l2). The closed part
        of the gap is concave and piecewise linear in t, so Newton's method from below finds the
        exact t in a few iterations.
        """
        scale = normal.flatten(1).abs().amax(1).clamp_min(TINY**3)  # avoids under- and overflow
        normal, gap = normal / per_sample(scale, x), gap / scale
        direction = normal.sign() * per_sample(gap.sign(), x)
        room = torch.where(direction > 0, 1.0 - x, x)
        weight = normal.abs()
        speed = torch.ones_like(weight) if self.norm == "linf" else weight
        rate, distance = (weight * speed).flatten(1), gap.abs()
        t_clipped, most = (room / speed).flatten(1), (weight * room).flatten(1)
        t = distance / rate.sum(1).clamp_min(TINY)
        for _ in range(x.shape[1:].numel()):
            clipped = t_clipped <= t.unsqueeze(1)
            remaining = distance - (most * clipped).sum(1)
            slope = (rate * ~clipped).sum(1)
            next_t = torch.where(slope > 0, remaining / slope.clamp_min(TINY), float("inf"))
            if not (next_t > t).any():
                break
            t = torch.maximum(t, next_t)
        return direction * torch.minimum(per_sample(t.clamp_max(HUGE), x) * speed, room)

    random_edge = RenamedAttribute("random_boundary_start")
    reach = RenamedAttribute("step_to_hyperplane")


def show_radius(eps: float) -> str:
    """A radius for people: 8/255 where it is a multiple of half a gray level and has no short
    decimal form, such as 0.2 or 0.5."""
    halves = round(2 * 255 * eps)
    if float(f"{eps:g}") != eps and abs(255 * eps - halves / 2) < 1e-6:
        return f"{halves / 2:g}/255"
    return f"{eps:g}"


def per_sample(values: Tensor, x: Tensor) -> Tensor:
    """Reshape one value per sample so that it broadcasts over the images."""
    return values.reshape(-1, *[1] * (x.dim() - 1))


def _unit(x: Tensor) -> Tensor:
    return x / per_sample(x.flatten(1).norm(dim=1), x).clamp_min(TINY)
