"""Mixed precision, with per-example gradient scaling for float16.

float16 has five exponent bits: anything below 6e-8 underflows to 0, and the gradient of a confident
prediction is far smaller. An attack would not move, and the model would look robust. So the
gradient of each example's logits is multiplied by a power of two before it goes back through the
network, and the gradient of its image is divided by it, in float32. Each example has its own scale,
which requires that examples are independent of each other; `check_independent` makes sure of that.
Where they are not, as under batch statistics in training, a common factor has to do. bfloat16 has
the range of float32 and needs none of this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dat.core import devices

Network = Callable[[Tensor], Tensor]
RangeCheck = Callable[[Tensor, str], None]
"""Called with values that may have overflowed, and what they are."""

PRECISIONS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
LARGEST_EXPONENT = 126
"""float32 can represent 2 to this power and its inverse."""


def in_precision(network: Network, precision: torch.dtype) -> Network:
    """The network under autocast, with float32 logits, for attacks in evaluation.

    In float16, image gradients are scaled, and values out of range raise a ValueError.
    """
    cast = autocast(network, precision)
    if precision != torch.float16:
        return cast

    def checked(x: Tensor) -> Tensor:
        logits = scale_gradients(cast, x)
        _check_range(logits, "logits")
        return logits

    return checked


def autocast(network: Network, precision: torch.dtype) -> Network:
    """The network under autocast, with float32 logits; gradients are not scaled."""
    if precision == torch.float32:
        return network

    def cast(x: Tensor) -> Tensor:
        with devices.autocast(x.device, precision):
            return network(x).float()

    return cast


@dataclass
class GradientScaling:
    """Scales the image gradients of one attack in training, which computes in float16.

    An overflow is recorded instead of raised, as the other workers would wait for this one.
    """

    common: float | None = None
    """One factor for all images, which depend on each other; None: a factor for each image."""
    overflowed: Tensor | None = None

    def __call__(self, network: Network) -> Network:
        """The network, under autocast already, with scaled gradients."""

        def scaled(x: Tensor) -> Tensor:
            logits = scale_gradients(network, x, common=self.common, check=self._record)
            self._record(logits, "logits")
            return logits

        return scaled

    def mark(self, x_adv: Tensor) -> Tensor:
        """The attack's result, or NaN if anything has overflowed. Then the loss is NaN as well,
        which every worker gets to know."""
        if self.overflowed is None:
            return x_adv
        return torch.where(self.overflowed, torch.nan, x_adv)

    def _record(self, values: Tensor, _: str) -> None:
        overflowed = ~values.detach().isfinite().all()  # stays on the device
        earlier = self.overflowed
        self.overflowed = overflowed if earlier is None else earlier | overflowed


def scale_gradients(
    network: Network, x: Tensor, *, common: float | None = None, check: RangeCheck | None = None
) -> Tensor:
    """Run a network that computes in float16 on float32 images, returning float32 logits.

    On the way back, each example's gradient is scaled before the network, by its own factor or by
    the `common` one, and unscaled after it; `check` gets the result, and raises by default.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return network(x)
    scale: list[Tensor] = []
    unscaled = _UnscaleGradient.apply(x, scale, check or _check_range)  # type: ignore[no-untyped-call]
    return _ScaleGradient.apply(network(unscaled), scale, common)  # type: ignore[no-untyped-call, no-any-return]


def independent(network: Network, x: Tensor) -> bool:
    """Whether an image's logits do not depend on the other images of its batch."""
    x = x.detach().requires_grad_(True)
    with torch.enable_grad():
        logits = network(x)[:1]
        if not logits.requires_grad:
            return True
        weights = torch.arange(1.0, 1 + logits.shape[1], device=logits.device)
        (gradient,) = torch.autograd.grad((logits * weights).sum(), x, allow_unused=True)
    return gradient is None or not gradient[1:].nan_to_num().any()


def check_independent(network: Network, x: Tensor) -> None:
    """Raise if an image's logits depend on the other images of its batch.

    Then no scale is right for one image alone, and one for all would lose the small gradients.
    """
    if not independent(network, x):
        raise ValueError(
            "float16: the logits of an image depend on the other images of its batch (a batch norm "
            "without running statistics?), so gradients cannot be scaled image by image; use "
            "bfloat16 or float32"
        )


class _ScaleGradient(torch.autograd.Function):
    """Identity; its backward pass scales each example's gradient and stores the scales."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, scale: list[Tensor], common: float | None) -> Tensor:
        ctx.scale, ctx.common = scale, common
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.common is not None:
            scale = gradient.new_full((len(gradient),), ctx.common)
        else:
            _, exponent = torch.frexp(gradient.flatten(1).abs().amax(1))
            power = -exponent.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
            scale = torch.ldexp(torch.ones_like(power, dtype=gradient.dtype), power)
        ctx.scale[:] = [scale]
        return gradient * scale.reshape(-1, *[1] * (gradient.dim() - 1)), None, None


class _UnscaleGradient(torch.autograd.Function):
    """Identity; its backward pass divides by the stored scales."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: list[Tensor], check: RangeCheck) -> Tensor:
        ctx.scale, ctx.check = scale, check
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.check(gradient, "gradients")
        if not ctx.scale:  # YOPO backpropagates through the first layer only
            return gradient, None, None
        return gradient / ctx.scale[0].reshape(-1, *[1] * (gradient.dim() - 1)), None, None


def _check_range(values: Tensor, what: str) -> None:
    """Raise on overflow: it would stop an attack, and the model would look robust."""
    overflowed = ~values.flatten(1).isfinite().all(1)
    if overflowed.any():
        raise ValueError(
            f"float16 overflow: {what} of {int(overflowed.sum())} of {len(values)} images are not "
            "finite; use bfloat16 or float32"
        )
