"""Gradient clipping: by the global norm, for every optimizer, after the exchange."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from dat.config import RunConfig, parse_edits
from dat.optim import OPTIMIZERS

NORM = 0.5


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def stepped(name: str, clip: float | None, scale: float = 1.0) -> tuple[list[Tensor], float]:
    """The weights after two steps with the same gradients, and the norm of the last gradient."""
    model = network()
    optimizer = OPTIMIZERS[name](lr=0.1, clip=clip)(model)
    random = torch.Generator().manual_seed(1)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = scale * torch.randn(parameter.shape, generator=random)
        optimizer.step()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return [p.detach().clone() for p in model.parameters()], float(torch.cat(gradients).norm())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_global_norm_is_at_most_the_limit(name: str) -> None:
    assert stepped(name, None)[1] > 2 * NORM
    assert stepped(name, NORM)[1] == pytest.approx(NORM, rel=1e-4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_smaller_gradient_is_left_alone(name: str) -> None:
    plain, clipped = stepped(name, None)[0], stepped(name, 1e6)[0]
    assert all(map(torch.equal, plain, clipped))


def test_clipping_agrees_with_torchs() -> None:
    """Against torch's own optimizer with its own clipping."""
    model, other = network(), network()
    ours = OPTIMIZERS["sgd"](lr=0.1, clip=NORM)(model)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(2)) * 10
    for _ in range(3):
        for net, optimizer in ((model, ours), (other, theirs)):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            if optimizer is theirs:
                nn.utils.clip_grad_norm_(net.parameters(), NORM)
            optimizer.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)


def test_the_clipping_of_a_copy_is_its_own() -> None:
    """Optimizers are made anew from settings, which stay as they are."""
    settings = OPTIMIZERS["lamb"](clip=NORM)
    assert copy.deepcopy(settings) == settings
    assert RunConfig.read(parse_edits(["optimizer.clip=0.5"])).optimizer.clip == NORM
    with pytest.raises(ValueError, match=r"optimizer\.clip = 0: must be above 0"):
        RunConfig.read(parse_edits(["optimizer.clip=0"]))
