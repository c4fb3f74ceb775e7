"""YOPO (Zhang et al. 2019): you only propagate once, then through the first layer alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from dat.attacks.base import Attack
from dat.attacks.target import Loss, NoImageGradient, forward
from dat.core.lazy import nn, torch
from dat.core.rng import Streams
from dat.core.settings import setting
from dat.core.threat import ThreatModel

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class YOPO(Attack):
    """Repeats `steps` times: a pass through the whole network yields the gradient at the first
    layer's output; with that fixed, `inner` ascent steps use the first layer only."""

    steps: int = setting(5, "m: passes through the whole network", ge=1)
    inner: int = setting(3, "n: steps through the first layer after each pass", ge=1)
    step_size: float | None = setting(
        None, "step size in pixels; none: 2.5 eps / (steps * inner)", gt=0
    )
    random_start: bool = setting(True, "start from a random point of the ball")

    def perturb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Streams) -> Tensor:
        default = 2.5 * threat.eps / (self.steps * self.inner)
        step_size = default if self.step_size is None else self.step_size
        x_adv = threat.random_start(x, draws) if self.random_start else x
        with torch.enable_grad():
            for _ in range(self.steps):
                costate = _first_layer_gradient(loss, x_adv)
                for _ in range(self.inner):
                    images = x_adv.detach().requires_grad_(True)
                    output = _first_layer_output(loss, images)
                    (gradient,) = torch.autograd.grad((costate * output).sum(), images)
                    x_adv = threat.ascend(images.detach(), gradient, step_size, x)
        return x_adv

    def cost(self) -> int:
        return 3 * self.steps


class _FirstLayerDone(Exception):
    """Carries the output of the first layer, so that the rest of the network is skipped."""

    def __init__(self, output: Tensor) -> None:
        self.output = output


def _first_layer_gradient(loss: Loss, x: Tensor) -> Tensor:
    """The gradient of the loss with respect to the first layer's output."""
    outputs: list[Tensor] = []

    def record(output: Tensor) -> Tensor:
        if outputs:
            return output
        outputs.append(output)
        return output.clone()  # the next layer may overwrite it, as an in-place ReLU does

    with _layer_hook(record):
        losses, _ = forward(loss, x.detach().requires_grad_(True))
    if not outputs:
        raise ValueError("yopo: the network has no convolution or linear layer to begin with")
    if not (losses.requires_grad and outputs[0].requires_grad):
        raise NoImageGradient
    (costate,) = torch.autograd.grad(losses.sum(), outputs[0], allow_unused=True)
    if costate is None:
        raise NoImageGradient
    return costate


def _first_layer_output(loss: Loss, x: Tensor) -> Tensor:
    """The output of the first layer, computed without the rest of the network."""

    def stop(output: Tensor) -> NoReturn:
        raise _FirstLayerDone(output)

    with _layer_hook(stop):
        try:
            loss(x)
        except _FirstLayerDone as done:
            return done.output
    raise AssertionError("the first layer was there a moment ago")


@contextmanager
def _layer_hook(on_output: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace the outputs of all convolution and linear layers, in any module, by `on_output`."""

    layers = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(module, layers) and isinstance(output, torch.Tensor):
            return on_output(output)
        return output

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
