"""APGD: known maxima, the checkpoints of the paper, and that it returns the best point."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dat.attacks import APGD, FGSM, PGD, AttackTarget, Loss, TargetedAPGD
from dat.attacks.target import LOSSES
from dat.core.losses import cross_entropy, targeted_dlr
from dat.core.rng import Streams
from dat.core.threat import ThreatModel
from tests.attacks.cases import answers, both_norms, images, wavy

Slope = Callable[[float], tuple[float, float]]
"""A loss of one pixel, and its derivative."""

EPS = 0.1
SHAPE = (6, 2, 3, 3)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def interior() -> Tensor:
    """Images far enough from 0 and 1 for the box not to matter."""
    return 0.3 + 0.4 * random(*SHAPE)


def weights() -> Tensor:
    return random(1, *SHAPE[1:], seed=1) - 0.5


def linear(x: Tensor) -> Tensor:
    return (weights() * x).flatten(1).sum(1)


def hill(summit: Tensor) -> Loss:
    """Concave, and highest at the summit."""
    return lambda x: -(x - summit).square().flatten(1).sum(1)


@pytest.mark.parametrize("steps", [1, 2, 20, 100])
def test_linf_optimum_of_a_linear_loss_is_a_corner(steps: int) -> None:
    """The first step spans the ball."""
    x = interior()
    x_adv = APGD(steps=steps)(linear, x, ThreatModel(norm="linf", eps=EPS))
    torch.testing.assert_close(x_adv, x + EPS * weights().sign(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("eps", [0.05, 0.5, 1.0])
def test_linf_optimum_in_the_box_is_the_clipped_corner(eps: float) -> None:
    x = (2 * random(*SHAPE) - 0.5).clamp(0, 1)
    x_adv = APGD(steps=20)(linear, x, ThreatModel(norm="linf", eps=eps))
    best = (x + eps * weights().sign()).clamp(0, 1)
    torch.testing.assert_close(x_adv, best, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("steps", "within"), [(20, 1e-3), (100, 1e-6)])
def test_l2_optimum_of_a_linear_loss_is_along_the_weights(steps: int, within: float) -> None:
    x, w = interior(), weights()
    x_adv = APGD(steps=steps)(linear, x, ThreatModel(norm="l2", eps=EPS))
    torch.testing.assert_close(x_adv, x + EPS * w / w.norm(), rtol=0, atol=within * EPS)


@both_norms
def test_a_summit_outside_the_ball_is_approached_up_to_its_edge(norm: str) -> None:
    x, threat = interior(), ThreatModel(norm=norm, eps=EPS)
    summit = x + 4 * EPS * (random(*SHAPE, seed=2) - 0.5).sign()
    x_adv = APGD()(hill(summit), x, threat)
    torch.testing.assert_close(x_adv, threat.project(summit, x), rtol=0, atol=1e-3 * EPS)


@both_norms
def test_a_summit_inside_the_ball_is_found_by_ever_shorter_steps(norm: str) -> None:
    """The remaining error is a few of the last steps: 2 eps, halved at the checkpoints."""
    x, threat = interior(), ThreatModel(norm=norm, eps=EPS)
    inside = x + 0.5 * (threat.random_start(x, Streams.of(1, "t", index=torch.arange(6))) - x)
    near, nearer = (threat.size(APGD(steps=n)(hill(inside), x, threat), inside) for n in (20, 100))
    assert (near < 0.2 * EPS).all() and (nearer < 0.02 * EPS).all()


def by_the_paper(steps: int) -> list[int]:
    """p_0 = 0, p_1 = 0.22, p_{j+1} = p_j + max(p_j - p_{j-1} - 0.03, 0.06); w_j = ceil(p_j N)."""
    places, last, place = [], 0, 22
    while place <= 100:
        places.append(math.ceil(place * steps / 100))
        last, place = place, place + max(place - last - 3, 6)
    return places


def counted(steps: int) -> list[int]:
    """Our checkpoints, counted from 1."""
    return sorted(place + 1 for place in APGD(steps=steps).checkpoints())


def by_the_reference(steps: int) -> list[int]:
    """The authors' implementation: it rounds the intervals down, not the checkpoints up."""
    period, shrink, smallest = (max(int(share * steps), 1) for share in (0.22, 0.03, 0.06))
    checkpoints, since = [], 0
    for step in range(1, steps + 1):
        since += 1
        if since == period:
            checkpoints.append(step)
            period, since = max(period - shrink, smallest), 0
    return checkpoints


def test_checkpoints_are_those_of_the_paper() -> None:
    assert counted(100) == by_the_paper(100) == [22, 41, 57, 70, 80, 87, 93, 99]


@pytest.mark.parametrize("steps", [200, 300, 1000])
def test_checkpoints_of_hundreds_of_steps_are_those_of_the_paper(steps: int) -> None:
    assert counted(steps) == by_the_paper(steps)


def test_checkpoints_of_any_count_are_those_of_the_reference_implementation() -> None:
    for steps in range(1, 301):
        assert counted(steps) == by_the_reference(steps)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 10, 17])
def test_few_steps_have_checkpoints_too(steps: int) -> None:
    places = counted(steps)
    assert places and places[0] >= 1 and places[-1] <= steps


class Recorder:
    """A loss that records its inputs and outputs."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.points: list[Tensor] = []
        self.losses: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        losses = self.loss(x)
        self.points.append(x.detach().clone())
        self.losses.append(losses.detach().clone())
        return losses


def wavy_loss(pixels: int) -> Loss:
    network = wavy(pixels, dtype=torch.float64)
    return lambda x: 3 * network(x).sum(1)


@both_norms
@pytest.mark.parametrize("steps", [1, 2, 7, 30])
def test_the_best_point_is_returned_not_the_last(norm: str, steps: int) -> None:
    x = images((8, 2, 3, 3), dtype=torch.float64)
    seen = Recorder(wavy_loss(18))
    x_adv = APGD(steps=steps)(seen, x, ThreatModel(norm=norm, eps=0.5))
    points, losses = torch.stack(seen.points), torch.stack(seen.losses)
    assert len(points) == steps + 1
    highest, when = losses.max(0)
    assert torch.equal(x_adv, points[when, torch.arange(8)])
    torch.testing.assert_close(wavy_loss(18)(x_adv), highest)
    if steps == 30:
        assert (when < steps).any()


@both_norms
def test_every_visited_point_is_in_ball_and_box(norm: str) -> None:
    x, threat = images((8, 2, 3, 3), dtype=torch.float64), ThreatModel(norm=norm, eps=0.3)
    seen = Recorder(wavy_loss(18))
    APGD(steps=20)(seen, x, threat)
    for point in seen.points:
        assert (threat.size(point, x) <= 0.3 + 1e-9).all()
        assert point.min() >= 0 and point.max() <= 1


def apgd_points(f: Slope, steps: int, x: float, eps: float, start: float) -> list[float]:
    """Algorithm 1 of the paper for one pixel; returns all points it visits."""

    def clip(z: float) -> float:
        return min(max(z, x - eps, 0.0), x + eps, 1.0)

    x_adv = previous = best = start
    visited, step, increases, since = [start], 2 * eps, 0, 0
    checkpoint_loss, halved = f(best)[0], True
    checkpoints = by_the_reference(steps)
    for k in range(1, steps + 1):
        stepped = clip(x_adv + math.copysign(step, f(x_adv)[1]))
        alpha = 1.0 if k == 1 else 0.75
        previous, x_adv = (
            x_adv,
            clip(x_adv + alpha * (stepped - x_adv) + (1 - alpha) * (x_adv - previous)),
        )
        increases += f(x_adv)[0] > f(visited[-1])[0]
        since += 1
        visited.append(x_adv)
        best = x_adv if f(x_adv)[0] > f(best)[0] else best
        if k in checkpoints:
            halve = increases <= 0.75 * since or (not halved and checkpoint_loss >= f(best)[0])
            step, x_adv = (step / 2, best) if halve else (step, x_adv)
            increases, since, checkpoint_loss, halved = 0, 0, f(best)[0], halve
    return visited


@pytest.mark.parametrize("steps", [1, 5, 10, 30, 100])
def test_momentum_and_halving_are_those_of_the_paper(steps: int) -> None:
    """On losses of one pixel, most of them with several maxima."""
    count = 60
    x = 0.2 + 0.6 * random(count, 1, 1, 1)
    tilt, waves, phase = (random(count, seed=seed) for seed in (1, 2, 3))
    tilt, waves, phase = 4 * tilt - 2, 5 + 60 * waves, 6 * phase

    def loss(z: Tensor) -> Tensor:
        flat = z.flatten()
        return tilt * flat + 0.1 * torch.sin(waves * flat + phase)

    def alone(row: int) -> Slope:
        t, w, p = (float(values[row]) for values in (tilt, waves, phase))
        return lambda z: (t * z + 0.1 * math.sin(w * z + p), t + 0.1 * w * math.cos(w * z + p))

    seen = Recorder(loss)
    APGD(steps=steps)(seen, x, ThreatModel(norm="linf", eps=0.15))
    points = torch.stack(seen.points).flatten(1)
    for row in range(count):
        visited = points[:, row].tolist()
        expected = apgd_points(alone(row), steps, float(x[row]), 0.15, visited[0])
        assert visited == pytest.approx(expected, abs=1e-9)


@both_norms
def test_gradients_of_a_random_network_are_averaged(norm: str) -> None:
    """Noise that alternates in sign vanishes from the mean of two calls."""
    shake, smooth, calls = 20 * (random(18) - 0.5), wavy_loss(18), 0

    def noisy(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        noise: Tensor = x.flatten(1) @ shake
        return smooth(x) + (noise if calls % 2 else -noise)

    x, threat = interior(), ThreatModel(norm=norm, eps=EPS)
    calm, shaken = APGD(steps=5)(smooth, x, threat), APGD(steps=5)(noisy, x, threat)
    assert calls == 6
    averaged = APGD(steps=5, eot=2)(noisy, x, threat)
    assert calls == 6 + 12
    torch.testing.assert_close(averaged, calm, rtol=0, atol=1e-9)
    assert (shaken - calm).abs().max() > 0.01


@pytest.mark.parametrize("loss", ["cross-entropy", "margin", "dlr"])
@both_norms
def test_its_own_loss_is_what_it_ascends(loss: str, norm: str) -> None:
    """The result is the same as with that loss as the given one."""
    x, network = images((5, 1, 3, 3), dtype=torch.float64), wavy(9, dtype=torch.float64)
    y, threat = answers(network, x), ThreatModel(norm=norm, eps=0.2)
    own = APGD(steps=5, loss=loss)(AttackTarget(network, y), x, threat)
    assert torch.equal(own, APGD(steps=5)(AttackTarget(network, y, LOSSES[loss]), x, threat))
    assert torch.equal(own, APGD(steps=5)(lambda z: LOSSES[loss](network(z), y), x, threat))


@both_norms
def test_targeted_apgd_climbs_the_targeted_loss(norm: str) -> None:
    x, network = images((5, 1, 3, 3), dtype=torch.float64), wavy(9, dtype=torch.float64)
    y, threat = answers(network, x), ThreatModel(norm=norm, eps=0.2)
    draws = Streams.of(0, "t", index=torch.arange(5))
    aims = AttackTarget(network, y).wrong_classes(x)[:, 1]
    one = TargetedAPGD(steps=5, first=2, targets=1)(AttackTarget(network, y), x, threat, draws)

    def aimed(z: Tensor) -> Tensor:
        return targeted_dlr(network(z), y, aims)

    assert torch.equal(one, APGD(steps=5)(aimed, x, threat, draws.fork("target", 2)))


@both_norms
@pytest.mark.parametrize("weaker", [PGD(steps=10), FGSM()], ids=repr)
def test_it_is_stronger_on_a_loss_with_many_summits(
    norm: str, weaker: Callable[..., Tensor]
) -> None:
    x, network = images((64, 1, 4, 4), dtype=torch.float64), wavy(16, dtype=torch.float64)
    y, threat = answers(network, x), ThreatModel(norm=norm, eps=0.2)
    target = AttackTarget(network, y)
    ours, theirs = (
        cross_entropy(network(attack(target, x, threat)), y).mean()
        for attack in (APGD(steps=10), weaker)
    )
    assert ours > theirs
