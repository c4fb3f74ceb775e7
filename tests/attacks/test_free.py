"""Free, called like any other attack: steps of a full radius on a fixed network."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dat.attacks import PGD, Free
from dat.core.settings import SettingError
from dat.core.threat import ThreatModel
from tests.attacks.cases import both_norms, images, wavy

EPS = 0.05
SHAPE = (6, 2, 3, 3)


def bumpy(x: Tensor) -> Tensor:
    return wavy(18, dtype=torch.float64)(x).sum(1)


@pytest.mark.parametrize("replays", [1, 2, 5])
@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_linf_is_the_formula(replays: int, ratio: float) -> None:
    """delta = clip(delta + alpha * sign(gradient), -eps, eps), from delta = 0."""
    x = images(SHAPE, dtype=torch.float64)
    delta = torch.zeros_like(x)
    for _ in range(replays):
        at = (x + delta).requires_grad_(True)
        (gradient,) = torch.autograd.grad(bumpy(at).sum(), at)
        delta = (delta + ratio * EPS * gradient.sign()).clamp(-EPS, EPS)
        delta = (x + delta).clamp(0, 1) - x
    x_adv = Free(replays=replays, step_ratio=ratio)(bumpy, x, ThreatModel(eps=EPS))
    torch.testing.assert_close(x_adv, x + delta, rtol=0, atol=1e-12)


@both_norms
def test_it_is_pgd_from_the_image_itself(norm: str) -> None:
    x, threat = images(SHAPE, dtype=torch.float64), ThreatModel(norm=norm, eps=EPS)
    free = Free(replays=3, step_ratio=0.6)(bumpy, x, threat)
    pgd = PGD(steps=3, step_size=0.6 * EPS, random_start=False)(bumpy, x, threat)
    assert torch.equal(free, pgd)
    assert Free(replays=3).cost() == PGD(steps=3).cost()


@both_norms
def test_a_replay_goes_on_from_the_last_one(norm: str) -> None:
    """The trainer's steps, with gradients from the update, equal those of the attack."""
    x, threat = images(SHAPE, dtype=torch.float64), ThreatModel(norm=norm, eps=EPS)
    free, x_adv = Free(replays=4, step_ratio=0.5), x
    for _ in range(4):
        at = x_adv.clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(bumpy(at).sum(), at)
        x_adv = free.ascend(x_adv, 1e-3 * gradient, x, threat)  # how long it is does not matter
    torch.testing.assert_close(x_adv, free(bumpy, x, threat), rtol=0, atol=1e-12)


def test_no_replay_and_no_step_are_refused() -> None:
    with pytest.raises(SettingError, match=r"Free\.replays = 0: must be at least 1"):
        Free(replays=0)
    with pytest.raises(SettingError, match=r"Free\.step_ratio = 0: must be above 0"):
        Free(step_ratio=0)
