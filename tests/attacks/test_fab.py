"""FAB: the distance to a boundary is known where the boundary is flat."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dat.attacks import FAB, AttackTarget
from dat.core.rng import Streams
from dat.core.threat import ThreatModel
from tests.attacks.cases import Network, answers, both_norms, images, wavy, wrong

FAR = {"linf": 1.0, "l2": 10.0}
"""A radius that covers everything."""
PIXELS = 24


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def flat(classes: int = 2) -> tuple[Network, Tensor]:
    """A linear network without bias, for images around 0.5, and its weights."""
    w = random(classes, PIXELS, seed=1) - 0.5
    return lambda x: (x.flatten(1) - 0.5) @ w.T, w


def interior(count: int = 12) -> Tensor:
    """Images closer to the decision boundary than to the box."""
    return 0.45 + 0.1 * random(count, 2, 3, 4)


def distance(x: Tensor, w: Tensor, norm: str) -> Tensor:
    """|f(x)| over the dual norm of its gradient."""
    direction = w[1] - w[0]
    dual = direction.abs().sum() if norm == "linf" else direction.norm()
    return ((x.flatten(1) - 0.5) @ direction).abs() / dual


@both_norms
@pytest.mark.parametrize(("steps", "overshoot"), [(1, 1.05), (1, 1.3), (2, 1.05), (20, 1.05)])
def test_a_flat_boundary_is_found_at_its_distance(norm: str, steps: int, overshoot: float) -> None:
    """The first step overshoots; later ones return and overshoot by less."""
    (network, w), x = flat(), interior()
    threat, y = ThreatModel(norm=norm, eps=FAR[norm]), answers(network, x)
    x_adv = FAB(steps=steps, overshoot=overshoot)(AttackTarget(network, y), x, threat)
    assert wrong(network, x_adv, y).all()
    ratio = threat.size(x_adv, x) / distance(x, w, norm)
    assert (ratio > 1).all()
    if steps == 1:
        torch.testing.assert_close(ratio, torch.full_like(ratio, overshoot))
    else:
        assert (ratio < 1.01).all()


@both_norms
def test_the_path_to_a_flat_boundary_is_straight(norm: str) -> None:
    (network, w), x = flat(), interior()
    y = answers(network, x)
    x_adv = FAB(steps=5)(AttackTarget(network, y), x, ThreatModel(norm=norm, eps=FAR[norm]))
    direction = (w[1] - w[0]) * (1 - 2 * y).unsqueeze(1)
    direction = (
        direction.sign() if norm == "linf" else direction / direction.norm(dim=1, keepdim=True)
    )
    delta = (x_adv - x).flatten(1)
    size = ThreatModel(norm=norm).length(delta)
    torch.testing.assert_close(delta / size.unsqueeze(1), direction)


@both_norms
@pytest.mark.parametrize("until_broken", [False, True])
def test_images_near_the_boundary_are_misclassified_and_no_others(
    norm: str, until_broken: bool
) -> None:
    (network, w), x = flat(), interior(40)
    far, y = distance(x, w, norm), answers(network, x)
    threat = ThreatModel(norm=norm, eps=float(far.median()))
    x_adv = FAB(steps=20)(AttackTarget(network, y, until_broken=until_broken), x, threat)
    assert (threat.size(x_adv, x) <= threat.eps + 1e-12).all()
    broken = wrong(network, x_adv, y)
    assert broken[far < 0.99 * threat.eps].all()
    assert not broken[far > threat.eps].any()


@both_norms
def test_images_out_of_reach_are_projected_onto_the_ball(norm: str) -> None:
    """Points that crossed outside the ball are projected, and stay on the line to the boundary."""
    (network, w), x = flat(), interior()
    far = distance(x, w, norm)
    threat = ThreatModel(norm=norm, eps=float(far.min()) / 2)
    target = AttackTarget(network, answers(network, x))
    x_adv = FAB(steps=5)(target, x, threat)
    torch.testing.assert_close(threat.size(x_adv, x), torch.full_like(far, threat.eps))
    torch.testing.assert_close(distance(x_adv, w, norm), far - threat.eps)


@both_norms
def test_walls_of_the_box_are_followed(norm: str) -> None:
    """Half of the pixels are at the bound they would cross, so the others move further."""
    x, half, gap = interior(1), PIXELS // 2, 0.5
    w = random(PIXELS, seed=1) - 0.5
    x.view(-1)[:half] = (w[:half] > 0).double()

    def network(z: Tensor) -> Tensor:
        ahead = (z - x).flatten(1) @ w - gap
        return torch.stack((torch.zeros_like(ahead), ahead), 1)

    y, threat = torch.zeros(1, dtype=torch.int64), ThreatModel(norm=norm, eps=FAR[norm])
    x_adv = FAB(steps=10)(AttackTarget(network, y), x, threat)
    assert wrong(network, x_adv, y).all()
    assert torch.equal(x_adv.view(-1)[:half], x.view(-1)[:half])
    dual = w[half:].abs().sum() if norm == "linf" else w[half:].norm()
    ratio = float(threat.size(x_adv, x) * dual / gap)
    assert 1 < ratio < 1.05


@both_norms
def test_more_steps_come_nearer(norm: str) -> None:
    network, x = wavy(16, dtype=torch.float64), images((32, 1, 4, 4), dtype=torch.float64)
    y, threat = answers(network, x), ThreatModel(norm=norm, eps=FAR[norm])
    sizes = []
    for steps in (2, 10, 30):
        x_adv = FAB(steps=steps, targets=1)(AttackTarget(network, y), x, threat)
        size = threat.size(x_adv, x)
        sizes.append(torch.where(wrong(network, x_adv, y), size, torch.inf))
    assert (sizes[1] <= sizes[0] + 1e-12).all() and (sizes[2] <= sizes[1] + 1e-12).all()
    assert (sizes[1] < sizes[0]).any()


@both_norms
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_network_without_a_slope_is_no_trouble(norm: str, value: float) -> None:
    x = torch.full((3, 1, 2, 2), value)
    level = torch.tensor([1.0, 0.5, 0.0, 0.0])
    target = AttackTarget(lambda z: 0 * z.flatten(1) + level, torch.zeros(3, dtype=torch.int64))
    x_adv = FAB(steps=3)(target, x, ThreatModel(norm=norm, eps=0.1))
    assert torch.equal(x_adv, x)


@both_norms
def test_nothing_in_it_is_random(norm: str) -> None:
    network, x = wavy(16, dtype=torch.float64), images((4, 1, 4, 4), dtype=torch.float64)
    target, threat = AttackTarget(network, answers(network, x)), ThreatModel(norm=norm, eps=0.1)
    one, other = (
        FAB(steps=3)(target, x, threat, Streams.of(seed, "t", index=torch.arange(4)))
        for seed in (0, 1)
    )
    assert torch.equal(one, other)
