"""Optimizers against transcriptions of the papers' algorithms and against other implementations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import pytorch_optimizer
import torch
from numpy.typing import NDArray
from torch import nn

from dat.optim import LAMB, LARS, LSGD, SGD, OptimizerSettings, set_rate
from tests.optim.cases import assert_same, give_gradients, layers, train

Layers = list[NDArray[np.float64]]
Rule = Callable[[Layers, Layers, float], None]
"""Updates the layers in place, given their gradients and the learning rate."""


def length(x: NDArray[np.float64]) -> float:
    return float(np.sqrt((x * x).sum()))


def ratio(weight: float, u: NDArray[np.float64], c_l: float, c_u: float) -> float:
    tau = min(max(weight, c_l), c_u)
    return tau / length(u) if tau > 0 and length(u) > 0 else 1.0


def algorithm_a2(
    *, betas: tuple[float, float], zeta: float, decay: float, c_l: float, c_u: float
) -> Rule:
    """LAMB as in Algorithm A2 of the paper, with the weight decay of 'Training details'."""
    moments: dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
    t = 0

    def update(theta: Layers, grads: Layers, eta: float) -> None:
        nonlocal t
        t += 1
        for i, g in enumerate(grads):
            m, v = moments.get(i, (np.zeros_like(g), np.zeros_like(g)))
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g**2
            moments[i] = m, v
            m_hat = m / (1 - betas[0] ** t)
            v_hat = v / (1 - betas[1] ** t)
            u = m_hat / (np.sqrt(v_hat) + zeta) + decay * theta[i]
            theta[i] = theta[i] - eta * ratio(length(theta[i]), u, c_l, c_u) * u

    return update


def you_2019(*, beta: float, decay: float, c_l: float, c_u: float) -> Rule:
    """LARS, Algorithm 1 of You et al. 2019."""
    momentum: dict[int, NDArray[np.float64]] = {}

    def update(theta: Layers, grads: Layers, eta: float) -> None:
        for i, g in enumerate(grads):
            old = momentum.get(i, np.zeros_like(g))
            momentum[i] = m = beta * old + (1 - beta) * (g + decay * theta[i])
            theta[i] = theta[i] - eta * ratio(length(theta[i]), m, c_l, c_u) * m

    return update


def you_2017(*, momentum: float, decay: float, trust: float) -> Rule:
    """LARS, Algorithm 1 of You et al. 2017; local rate 1 for a layer at zero."""
    velocity: dict[int, NDArray[np.float64]] = {}

    def update(theta: Layers, grads: Layers, gamma: float) -> None:
        for i, g in enumerate(grads):
            weight = length(theta[i])
            local = trust * weight / (length(g) + decay * weight) if weight > 0 else 1.0
            old = velocity.get(i, np.zeros_like(g))
            velocity[i] = v = momentum * old + gamma * local * (g + decay * theta[i])
            theta[i] = theta[i] - v

    return update


def follow(config: OptimizerSettings, rule: Rule, *, scale: float) -> None:
    """Seven steps with a changing learning rate, compared after each."""
    model = layers(scale=scale)
    optimizer = config(model)
    theta = [param.detach().numpy().copy() for param in model.parameters()]
    for step in range(7):
        give_gradients(model, step)
        factor = 1 / (1 + step % 3)
        set_rate(optimizer, factor)
        grads = [param.grad.numpy() for param in model.parameters() if param.grad is not None]
        rule(theta, grads, config.lr * factor)
        optimizer.step()
        for param, expected in zip(model.parameters(), theta, strict=True):
            np.testing.assert_allclose(param.detach().numpy(), expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("decay", [0.0, 1e-4, 0.1])
@pytest.mark.parametrize(("c_l", "c_u", "scale"), [(0.0, 10.0, 1.0), (0.5, 2.0, 1.0), (0, 10, 9)])
def test_lamb_is_algorithm_a2(decay: float, c_l: float, c_u: float, scale: float) -> None:
    config = LAMB(lr=0.05, weight_decay=decay, c_l=c_l, c_u=c_u)
    rule = algorithm_a2(betas=config.betas, zeta=config.zeta, decay=decay, c_l=c_l, c_u=c_u)
    follow(config, rule, scale=scale)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("c_l", "c_u"), [(0.0, 10.0), (0.5, 2.0)])
def test_lars_is_algorithm_1_of_you_2019(decay: float, c_l: float, c_u: float) -> None:
    config = LARS(lr=0.05, weight_decay=decay, c_l=c_l, c_u=c_u, momentum=0.8)
    follow(config, you_2019(beta=0.8, decay=decay, c_l=c_l, c_u=c_u), scale=1.0)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_classic_lars_is_algorithm_1_of_you_2017(decay: float) -> None:
    config = LARS(preset="classic", lr=0.5, weight_decay=decay, trust_coefficient=0.03)
    follow(config, you_2017(momentum=0.9, decay=decay, trust=0.03), scale=1.0)


def side_by_side(
    config: OptimizerSettings,
    reference: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    scale: float,
) -> tuple[nn.Module, nn.Module]:
    mine, theirs = layers(scale=scale), layers(scale=scale)
    train(mine, config(mine), range(7))
    train(theirs, reference(theirs), range(7))
    return mine, theirs


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("scale", [1.0, 9.0])
def test_official_lamb_agrees_with_pytorch_optimizer(decay: float, scale: float) -> None:
    # theirs has eps in the ratio's denominator too: small enough, it cannot be seen; without its
    # adam_debias the rate is divided by 1 - beta1^t, which no version of the algorithm does
    mine, theirs = side_by_side(
        LAMB(preset="official", lr=0.05, weight_decay=decay, zeta=1e-13),
        lambda model: pytorch_optimizer.Lamb(
            model.parameters(),
            lr=0.05,
            weight_decay=decay,
            weight_decouple=False,
            eps=1e-13,
            adam_debias=True,
        ),
        scale=scale,
    )
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_classic_lars_agrees_with_pytorch_optimizer() -> None:
    mine, theirs = side_by_side(
        LARS(
            preset="classic",
            lr=0.5,
            weight_decay=0.1,
            trust_coefficient=0.03,
            decay_1d=False,
            adapt_1d=False,
        ),
        lambda model: pytorch_optimizer.LARS(
            model.parameters(), lr=0.5, weight_decay=0.1, trust_coefficient=0.03
        ),
        scale=1.0,
    )
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_bitwise_identical_to_torchs(nesterov: bool) -> None:
    mine, theirs = layers(torch.float32), layers(torch.float32)
    reference = torch.optim.SGD(
        theirs.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=nesterov
    )
    train(mine, SGD(weight_decay=5e-4, nesterov=nesterov)(mine), range(5))
    train(theirs, reference, range(5))
    assert_same(mine, theirs)


def test_lsgd_is_sgd_with_the_scaled_rate() -> None:
    mine, theirs = layers(torch.float32), layers(torch.float32)
    train(mine, LSGD(lr=0.1)(mine, batch=1024), range(5))
    train(theirs, SGD(lr=0.4)(theirs, batch=1024), range(5))
    assert_same(mine, theirs)


def test_lsgd_scales_its_peak_rate_by_the_global_batch() -> None:
    optimizer = LSGD(lr=0.1, base_batch=128)(layers(), batch=6 * 2048)
    assert {group["lr"] for group in optimizer.param_groups} == {0.1 * 6 * 2048 / 128}
    assert {group["initial_lr"] for group in optimizer.param_groups} == {0.1 * 6 * 2048 / 128}
