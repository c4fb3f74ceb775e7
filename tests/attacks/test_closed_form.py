"""On a linear model the best perturbation is known; and special cases that equal other attacks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dat.attacks import FGSM, PGD, Attack, Free
from dat.core.threat import ThreatModel

EPS = 0.1
SHAPE = (6, 2, 3, 3)

LINF_ATTACKS = [
    PGD(steps=10),
    PGD(steps=10, random_start=False),
    PGD(steps=5, step_size=EPS, restarts=2),
    PGD(steps=1, random_start=False),
    FGSM(step_ratio=1, random_start=False),
    FGSM(step_ratio=2),
    Free(),
    Free(replays=3, step_ratio=0.4),
]
"""Each can reach the far side of the ball."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def interior() -> Tensor:
    """Images far enough from 0 and 1 for the box not to matter."""
    return 0.3 + 0.4 * random(*SHAPE)


def weights() -> Tensor:
    return random(1, *SHAPE[1:], seed=1) - 0.5


def margin(x: Tensor) -> Tensor:
    return (weights() * x).flatten(1).sum(1)


@pytest.mark.parametrize("attack", LINF_ATTACKS, ids=repr)
def test_linf_optimum_is_a_corner(attack: Attack) -> None:
    x, w = interior(), weights()
    x_adv = attack(margin, x, ThreatModel(norm="linf", eps=EPS))
    torch.testing.assert_close(x_adv, x + EPS * w.sign(), rtol=0, atol=1e-6)
    torch.testing.assert_close(margin(x_adv), margin(x) + EPS * w.abs().sum(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("attack", LINF_ATTACKS, ids=repr)
@pytest.mark.parametrize("eps", [0.05, 0.5, 1.0])
def test_linf_optimum_in_the_box_is_the_clipped_corner(attack: Attack, eps: float) -> None:
    x, w = (2 * random(*SHAPE) - 0.5).clamp(0, 1), weights()
    if isinstance(attack, PGD) and attack.step_size is not None:
        attack = PGD(steps=attack.steps, step_size=eps, restarts=attack.restarts)
    x_adv = attack(margin, x, ThreatModel(norm="linf", eps=eps))
    best = (x + eps * w.sign()).clamp(0, 1)
    torch.testing.assert_close(x_adv, best, rtol=0, atol=1e-6)
    torch.testing.assert_close(margin(x_adv), margin(best), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "attack",
    [
        PGD(steps=30, step_size=EPS),
        PGD(steps=10, random_start=False),
        PGD(steps=30, step_size=EPS, restarts=2),
        FGSM(step_ratio=1, random_start=False),
        Free(),
    ],
    ids=repr,
)
def test_l2_optimum_is_along_the_weights(attack: Attack) -> None:
    x, w = interior(), weights()
    x_adv = attack(margin, x, ThreatModel(norm="l2", eps=EPS))
    torch.testing.assert_close(x_adv, x + EPS * w / w.norm(), rtol=0, atol=1e-6)
    torch.testing.assert_close(margin(x_adv), margin(x) + EPS * w.norm(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_linear_classifier_loses_eps_times_the_dual_norm(norm: str) -> None:
    """Cross-entropy of two classes is softplus of the margin, so its maximum is known too."""
    linear = nn.Linear(18, 2, bias=False)
    nn.init.uniform_(linear.weight, generator=torch.Generator().manual_seed(2))
    net = nn.Sequential(nn.Flatten(), linear)
    x, y = interior(), torch.tensor([0, 1, 0, 1, 1, 0])
    x_adv = PGD(steps=40, step_size=EPS)(
        lambda z: F.cross_entropy(net(z), y, reduction="none"), x, ThreatModel(norm=norm, eps=EPS)
    )
    with torch.no_grad():
        w = linear.weight[1 - y] - linear.weight[y]  # from right to wrong
        dual = w.abs().sum(1) if norm == "linf" else w.norm(dim=1)
        best = F.softplus((w * x.flatten(1)).sum(1) + EPS * dual)
        reached = F.cross_entropy(net(x_adv), y, reduction="none")
    torch.testing.assert_close(reached, best, rtol=0, atol=1e-5)


def wavy(x: Tensor) -> Tensor:
    w = torch.randn(18, 3, generator=torch.Generator().manual_seed(1))
    return torch.sin(x.flatten(1) @ w).sum(1)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("random_start", [True, False])
def test_fgsm_is_one_step_of_pgd(norm: str, random_start: bool) -> None:
    threat = ThreatModel(norm=norm, eps=EPS)
    fgsm = FGSM(step_ratio=1.5, random_start=random_start)
    pgd = PGD(steps=1, step_size=1.5 * EPS, random_start=random_start)
    assert torch.equal(fgsm(wavy, interior(), threat), pgd(wavy, interior(), threat))


def test_default_step_size_is_two_and_a_half_radii_over_the_steps() -> None:
    threat = ThreatModel(norm="l2", eps=EPS)
    by_default, explicit = PGD(steps=4), PGD(steps=4, step_size=2.5 * EPS / 4)
    assert torch.equal(by_default(wavy, interior(), threat), explicit(wavy, interior(), threat))
