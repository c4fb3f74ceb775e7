"""YOPO (Zhang et al. 2019): you only propagate once, and then through the first layer alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from dat.attacks.base import Attack
from dat.attacks.victim import Loss, see
from dat.fields import setting
from dat.rng import Draws
from dat.threat import ThreatModel

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


@dataclass(frozen=True, kw_only=True)
class YOPO(Attack):
    """`steps` times: one pass through the whole network gives the gradient at the first layer's
    output; with that held fixed, `inner` steps need the first layer only."""

    steps: int = setting(5, "passes through the whole network, m", ge=1)
    inner: int = setting(3, "steps through the first layer for each, n", ge=1)
    step_size: float | None = setting(
        None, "step size in pixels; none is 2.5 eps / (steps * inner)", gt=0
    )
    random_start: bool = setting(True, "start from a random point of the ball")

    @torch.enable_grad()
    def perturb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Draws) -> Tensor:
        usual = 2.5 * threat.eps / (self.steps * self.inner)
        step = usual if self.step_size is None else self.step_size
        x_adv = threat.random_start(x, draws) if self.random_start else x
        for _ in range(self.steps):
            costate = _at_first_layer(loss, x_adv)
            for _ in range(self.inner):
                images = x_adv.detach().requires_grad_(True)
                first = _first_layer(loss, images)
                (gradient,) = torch.autograd.grad((costate * first).sum(), images)
                x_adv = threat.ascend(images.detach(), gradient, step, x)
        return x_adv

    def cost(self) -> int:
        return 3 * self.steps


class _Enough(Exception):
    """The first layer has answered; the rest of the network need not."""

    def __init__(self, output: Tensor) -> None:
        self.output = output


def _at_first_layer(loss: Loss, x: Tensor) -> Tensor:
    """The gradient of the loss at the first layer's output."""
    found: list[Tensor] = []

    def note(output: Tensor) -> Tensor:
        if found:
            return output
        found.append(output)
        return output.clone()  # the next layer may overwrite it, as a ReLU in place does

    with _hooked(note):
        value, _ = see(loss, x.detach().requires_grad_(True))
    if not found:
        raise ValueError("yopo: the network has no convolution or linear layer to begin with")
    return torch.autograd.grad(value.sum(), found[0])[0]


def _first_layer(loss: Loss, x: Tensor) -> Tensor:
    """What the first layer makes of the images, without the rest of the network."""

    def stop(output: Tensor) -> NoReturn:
        raise _Enough(output)

    with _hooked(stop):
        try:
            loss(x)
        except _Enough as enough:
            return enough.output
    raise AssertionError("the first layer was there a moment ago")


@contextmanager
def _hooked(see_output: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Show the outputs of layers, whatever module they are in, and go on with what comes back."""

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(module, LAYERS) and isinstance(output, Tensor):
            return see_output(output)
        return output

    handle = register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
