"""The geometry: nearest points, uniform starts, the box."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from dat.fields import SettingError
from dat.rng import Draws
from dat.threat import ThreatModel

both_norms = pytest.mark.parametrize("norm", ["linf", "l2"])
radii = st.floats(0, 2) | st.sampled_from([0.0, 1 / 255, 8 / 255, 100.0])
shapes = st.tuples(*(st.integers(1, top) for top in (3, 3, 4, 4)))


def draws(count: int, seed: int = 0) -> Draws:
    return Draws.of(seed, "test", index=torch.arange(count))


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=source, dtype=torch.float64)


def pixels(shape: tuple[int, ...], seed: int) -> Tensor:
    """Images of which many pixels are exactly 0 or 1."""
    return (2 * random(shape, seed) - 0.5).clamp(0, 1)


def norms(threat: ThreatModel, delta: Tensor) -> Tensor:
    order = math.inf if threat.norm == "linf" else 2
    found: Tensor = torch.linalg.vector_norm(delta.flatten(1).double(), order, dim=1)
    return found


@both_norms
@settings(derandomize=True, deadline=None, max_examples=60)
@given(eps=radii, shape=shapes, seed=st.integers(0, 10**6), far=st.floats(0, 10))
def test_projection_is_in_ball_and_box_and_idempotent(
    norm: str, eps: float, shape: tuple[int, ...], seed: int, far: float
) -> None:
    threat = ThreatModel(norm=norm, eps=eps)
    x = pixels(shape, seed)
    once = threat.project(x + far * (random(shape, seed + 1) - 0.5), x)
    assert (norms(threat, once - x) <= eps + 1e-9).all()
    assert once.min() >= 0 and once.max() <= 1
    torch.testing.assert_close(threat.project(once, x), once, rtol=0, atol=1e-12)


@both_norms
@settings(derandomize=True, deadline=None, max_examples=60)
@given(eps=st.floats(1e-3, 0.3), shape=shapes, seed=st.integers(0, 10**6))
def test_projection_without_box_is_the_nearest_point(
    norm: str, eps: float, shape: tuple[int, ...], seed: int
) -> None:
    threat = ThreatModel(norm=norm, eps=eps)
    x = 0.4 + 0.2 * random(shape, seed)  # the ball stays inside [0, 1]
    outside = x + 2 * (random(shape, seed + 1) - 0.5)
    nearest = threat.project(outside, x)
    # p is nearest to q in a convex set iff (q - p) . (z - p) <= 0 for each z of it; the largest
    # value over the ball around x is (q - p) . (x - p) + eps * the dual norm of q - p
    rest = (outside - nearest).flatten(1)
    dual = rest.abs().sum(1) if norm == "linf" else rest.norm(dim=1)
    largest = (rest * (x - nearest).flatten(1)).sum(1) + eps * dual
    assert largest.max() <= 1e-9


@both_norms
def test_projection_moves_no_point_of_the_set(norm: str) -> None:
    x = pixels((4, 2, 3, 3), 0)
    inside = (x + 0.01 * (random((4, 2, 3, 3), 1) - 0.5)).clamp(0, 1)
    threat = ThreatModel(norm=norm, eps=0.1)
    torch.testing.assert_close(threat.project(inside, x), inside, rtol=0, atol=1e-15)


@both_norms
def test_eps_zero_gives_the_image(norm: str) -> None:
    threat, x = ThreatModel(norm=norm, eps=0), pixels((3, 1, 4, 4), 0)
    assert torch.equal(threat.random_start(x, draws(3)), x)
    assert torch.equal(threat.project(random((3, 1, 4, 4), 1), x), x)
    assert torch.equal(threat.ascend(x, torch.ones_like(x), 0.1, x), x)


def test_linf_start_is_uniform_in_the_ball() -> None:
    x = torch.full((2000, 1, 2, 2), 0.5, dtype=torch.float64)
    start = ThreatModel(norm="linf", eps=0.2).random_start(x, draws(2000))
    delta = ((start - x) / 0.2).flatten(1)
    assert stats.kstest(delta.flatten().numpy(), "uniform", args=(-1, 2)).pvalue > 0.01
    off_diagonal = torch.corrcoef(delta.T) - torch.eye(4)
    assert off_diagonal.abs().max() < 5 / 2000**0.5


@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 2, 2), (3, 4, 4)])
def test_l2_start_is_uniform_in_the_ball(shape: tuple[int, ...]) -> None:
    x = torch.full((2000, *shape), 0.5, dtype=torch.float64)
    start = ThreatModel(norm="l2", eps=0.4).random_start(x, draws(2000))
    delta = ((start - x) / 0.4).flatten(1)
    radius = delta.norm(dim=1)
    assert radius.max() <= 1
    assert stats.kstest((radius ** delta.shape[1]).numpy(), "uniform").pvalue > 0.01
    # the angle in any plane is uniform, and knows nothing of the radius
    angle = torch.atan2(delta[:, 0], delta[:, 1])
    assert stats.kstest(angle.numpy(), "uniform", args=(-math.pi, 2 * math.pi)).pvalue > 0.01
    assert abs(torch.corrcoef(torch.stack((angle, radius)))[0, 1]) < 5 / 2000**0.5


@both_norms
def test_start_of_a_sample_is_its_own(norm: str) -> None:
    threat, x = ThreatModel(norm=norm, eps=0.3), pixels((5, 2, 3, 3), 0)
    rows = torch.tensor([4, 1])
    all_ = threat.random_start(x, draws(5))
    assert torch.equal(threat.random_start(x[rows], draws(5).pick(rows)), all_[rows])
    assert not torch.equal(threat.random_start(x, draws(5, seed=1)), all_)


def test_ascent_goes_along_the_sign() -> None:
    x = torch.full((1, 1, 1, 3), 0.5)
    gradient = torch.tensor([7.0, -1e-20, 0.0]).reshape_as(x)
    found = ThreatModel(norm="linf", eps=0.3).ascend(x, gradient, 0.1, x)
    torch.testing.assert_close(found.flatten(), torch.tensor([0.6, 0.4, 0.5]))


def test_ascent_goes_along_the_unit_gradient() -> None:
    x = torch.full((2, 1, 1, 2), 0.5)
    gradient = torch.tensor([[30.0, -40.0], [3e-6, 4e-6]]).reshape_as(x)
    found = ThreatModel(norm="l2", eps=0.3).ascend(x, gradient, 0.1, x).flatten(1)
    torch.testing.assert_close(found, torch.tensor([[0.56, 0.42], [0.56, 0.58]]))


@both_norms
def test_ascent_along_a_zero_gradient_stays(norm: str) -> None:
    x = pixels((2, 1, 3, 3), 0)
    assert torch.equal(ThreatModel(norm=norm).ascend(x, torch.zeros_like(x), 0.1, x), x)


@both_norms
def test_ascent_ends_on_the_ball(norm: str) -> None:
    threat, x = ThreatModel(norm=norm, eps=0.1), torch.full((3, 1, 2, 2), 0.5)
    found = threat.ascend(x, random((3, 1, 2, 2), 0).float() + 0.1, 5.0, x)
    torch.testing.assert_close(threat.size(found, x), torch.full((3,), 0.1))


def test_size_is_the_norm() -> None:
    x = torch.zeros(1, 1, 1, 2)
    other = torch.tensor([0.3, -0.4]).reshape_as(x)
    assert ThreatModel(norm="linf").size(other, x).tolist() == pytest.approx([0.4])
    assert ThreatModel(norm="l2").size(other, x).tolist() == pytest.approx([0.5])


@both_norms
def test_arguments_are_left_alone(norm: str) -> None:
    threat, x, x_adv = ThreatModel(norm=norm), pixels((2, 1, 3, 3), 0), random((2, 1, 3, 3), 1)
    copies = x.clone(), x_adv.clone()
    threat.ascend(x_adv, torch.ones_like(x), 0.5, x)
    threat.random_start(x, draws(2))
    assert torch.equal(x, copies[0]) and torch.equal(x_adv, copies[1])


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"eps": -0.1}, "ThreatModel.eps = -0.1: must be at least 0"),
        ({"eps": math.nan}, "ThreatModel.eps = nan: must be at least 0"),
        ({"eps": "wide"}, "ThreatModel.eps = 'wide': must be number, at least 0"),
        ({"norm": "linff"}, "norm = 'linff': must be one of linf, l2 .did you mean linf"),
    ],
)
def test_impossible_threats_are_refused(settings_: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        ThreatModel(**settings_)  # type: ignore[arg-type]


@both_norms
def test_an_infinite_eps_is_refused(norm: str) -> None:
    with pytest.raises(SettingError):
        ThreatModel(norm=norm, eps=math.inf)
