"""Models and gradients for the optimizer tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dat.core.rng import generator

SHAPES = ((4, 3), (5, 2, 3, 3), (6,), (7,), ())


def layers(
    dtype: torch.dtype = torch.float64, *, seed: int = 0, scale: float = 1.0
) -> nn.ParameterList:
    """Layers of several shapes; the fourth starts at zero, as a bias does."""
    draws = generator(seed, "weights")
    weights = [scale * torch.randn(shape, generator=draws, dtype=dtype) for shape in SHAPES]
    weights[3].zero_()
    return nn.ParameterList([nn.Parameter(weight) for weight in weights])


def give_gradients(model: nn.Module, step: int, *, seed: int = 0, scale: float = 1.0) -> None:
    draws = generator(seed, "gradients", step)
    for param in model.parameters():
        param.grad = scale * torch.randn(param.shape, generator=draws, dtype=param.dtype)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, *, scale: float = 1.0
) -> None:
    for step in steps:
        give_gradients(model, step, scale=scale)
        optimizer.step()


def weights_of(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def assert_same(model: nn.Module, other: nn.Module) -> None:
    """Bit for bit."""
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
