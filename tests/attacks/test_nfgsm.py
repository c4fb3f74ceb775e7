"""N-FGSM against the formula: strong noise, one step, no projection."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dat.attacks import FGSM, NFGSM, PGD, Loss
from dat.core.rng import Streams
from dat.core.settings import SettingError
from dat.core.threat import ThreatModel
from tests.attacks.cases import both_norms, images, wavy

EPS = 0.05
SHAPE = (6, 2, 4, 4)


def interior() -> Tensor:
    """Images far enough from 0 and 1 for the box not to matter."""
    return 0.4 + 0.2 * images(SHAPE, dtype=torch.float64)


def draws() -> Streams:
    return Streams.of(3, "test", index=torch.arange(len(interior())))


def bumpy(x: Tensor) -> Tensor:
    return wavy(32, dtype=torch.float64)(x).sum(1)


def straight(x: Tensor) -> Tensor:
    """Increases with every other pixel and decreases with the rest."""
    return (signs() * x).flatten(1).sum(1)


def signs() -> Tensor:
    return torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(16).reshape(SHAPE[1:])


def slope(loss: Loss, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(loss(x).sum(), x)
    return gradient


@pytest.mark.parametrize("noise", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("ratio", [0.25, 1.0, 1.5])
def test_linf_is_noise_of_k_radii_and_a_step_of_alpha(noise: float, ratio: float) -> None:
    """The noise and the step are clipped to the box only."""
    x = images(SHAPE, dtype=torch.float64)
    eta = noise * EPS * (2 * draws().uniform(x.shape, x.dtype) - 1)
    noisy = (x + eta).clamp(0, 1)
    expected = (noisy + ratio * EPS * slope(bumpy, noisy).sign()).clamp(0, 1)
    x_adv = NFGSM(noise=noise, step_ratio=ratio)(bumpy, x, ThreatModel(eps=EPS), draws())
    torch.testing.assert_close(x_adv, expected, rtol=0, atol=1e-12)


def test_l2_is_a_point_of_the_larger_ball_and_a_step_along_the_gradient() -> None:
    x = interior()
    noisy = ThreatModel(norm="l2", eps=2 * EPS).random_start(x, draws())
    gradient = slope(bumpy, noisy)
    length = gradient.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1)
    x_adv = NFGSM(step_ratio=0.75)(bumpy, x, ThreatModel(norm="l2", eps=EPS), draws())
    torch.testing.assert_close(x_adv, noisy + 0.75 * EPS * gradient / length, rtol=0, atol=1e-12)


@both_norms
def test_the_network_is_asked_once_at_noise_that_fills_the_larger_ball(norm: str) -> None:
    x, seen = interior(), list[Tensor]()

    def asked(z: Tensor) -> Tensor:
        seen.append(z.detach().clone())
        return bumpy(z)

    threat = ThreatModel(norm=norm, eps=EPS)
    NFGSM(noise=3)(asked, x, threat, draws())
    (noisy,) = seen
    sizes = threat.size(noisy, x)
    assert (sizes <= 3 * EPS + 1e-12).all() and sizes.max() > 2.8 * EPS


def test_nothing_is_projected_to_the_ball() -> None:
    """On a linear loss the step is known, and half of the noise lies outside the ball."""
    x, threat = interior(), ThreatModel(eps=EPS)
    eta = 2 * EPS * (2 * draws().uniform(x.shape, x.dtype) - 1)
    delta = NFGSM()(straight, x, threat, draws()) - x
    torch.testing.assert_close(delta, eta + EPS * signs().expand_as(x), rtol=0, atol=1e-12)
    assert (delta.abs() > EPS).double().mean() > 0.25
    assert 2.8 * EPS < delta.abs().max() <= NFGSM().reach * EPS


@pytest.mark.parametrize(("noise", "ratio"), [(0.0, 1.0), (2.0, 1.0), (0.5, 1.25)])
def test_it_reaches_as_far_as_noise_and_step_together(noise: float, ratio: float) -> None:
    assert NFGSM(noise=noise, step_ratio=ratio).reach == noise + ratio
    assert FGSM().reach == PGD().reach == 1


@both_norms
def test_without_noise_it_is_fgsm_without_a_random_start(norm: str) -> None:
    x, threat = images(SHAPE, dtype=torch.float64), ThreatModel(norm=norm, eps=EPS)
    plain = FGSM(step_ratio=0.8, random_start=False)(bumpy, x, threat)
    x_adv = NFGSM(noise=0, step_ratio=0.8)(bumpy, x, threat)
    torch.testing.assert_close(x_adv, plain, rtol=0, atol=1e-12)


def test_negative_noise_and_a_step_of_zero_are_refused() -> None:
    with pytest.raises(SettingError, match=r"NFGSM\.noise = -1: must be at least 0"):
        NFGSM(noise=-1)
    with pytest.raises(SettingError, match=r"NFGSM\.step_ratio = 0: must be above 0"):
        NFGSM(step_ratio=0)
