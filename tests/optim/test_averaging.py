"""The moving average of the weights against its closed form."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dat.core.rng import generator
from dat.optim import EMA
from tests.optim.cases import assert_same


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()


def move(model: nn.Module, step: int) -> None:
    """New weights, and new statistics of the BatchNorm layer."""
    draws = generator(0, "weights", step)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=draws, dtype=param.dtype))
    model.train()
    model(torch.randn(8, 3, generator=draws, dtype=torch.float64))


@pytest.mark.parametrize("decay", [0.0, 0.15, 0.999])
def test_closed_form(decay: float) -> None:
    """Weight t contributes with 1 - d_t times all later decays."""
    model = network()
    ema = EMA(model, decay)
    weight = model.get_parameter("0.weight")
    path = [weight.detach().clone()]
    for step in range(6):
        move(model, step)
        ema.update(model)
        path.append(weight.detach().clone())
    decays = [min(decay, (1 + t) / (10 + t)) for t in range(6)]
    shares = [math.prod(decays)]
    shares += [(1 - decays[t]) * math.prod(decays[t + 1 :]) for t in range(6)]
    assert sum(shares) == pytest.approx(1)
    expected = torch.stack([s * w for s, w in zip(shares, path, strict=True)]).sum(0)
    torch.testing.assert_close(ema.module.get_parameter("0.weight").data, expected)


def test_without_a_warm_up_the_decay_is_constant() -> None:
    model = network()
    ema, weight = EMA(model, 0.9, warmup=False), model.get_parameter("0.weight")
    expected = weight.detach().clone()
    for step in range(4):
        move(model, step)
        ema.update(model)
        expected = 0.9 * expected + 0.1 * weight.detach()
    torch.testing.assert_close(ema.module.get_parameter("0.weight").data, expected)


def test_buffers_are_the_models() -> None:
    model = network()
    ema = EMA(model, 0.9)
    for step in range(2):
        move(model, step)
    ema.update(model)
    for own, new in zip(ema.module.buffers(), model.buffers(), strict=True):
        assert torch.equal(own, new)
        assert own is not new
    assert ema.module.get_buffer("1.num_batches_tracked") == 2


def test_the_averaged_module_is_an_independent_copy_in_eval_mode() -> None:
    model = network()
    ema = EMA(model, 0.9)
    assert not any(module.training for module in ema.module.modules())
    assert model.training
    assert not any(param.requires_grad for param in ema.module.parameters())
    before = ema.module.get_parameter("0.weight").clone()
    move(model, 0)
    assert torch.equal(ema.module.get_parameter("0.weight"), before)
    ema.update(model)
    assert not any(module.training for module in ema.module.modules())


def test_a_resumed_optimizer_is_bitwise_identical() -> None:
    model = network()
    ema = EMA(model, 0.999)
    move(model, 0)
    ema.update(model)
    resumed = EMA(network(), 0.999)
    resumed.load_state_dict(ema.state_dict())
    for average in (ema, resumed):
        move(model, 1)
        average.update(model)
    assert_same(ema.module, resumed.module)
    assert resumed.updates == 2


def test_integer_parameters_are_copied() -> None:
    model = nn.ParameterList(
        [torch.ones(2), nn.Parameter(torch.tensor([3, 4]), requires_grad=False)]
    )
    ema = EMA(model, 0.9)
    model[1].copy_(torch.tensor([5, 6]))
    ema.update(model)
    assert ema.module.get_parameter("1").tolist() == [5, 6]


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_a_wrong_decay_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="decay"):
        EMA(network(), decay)
