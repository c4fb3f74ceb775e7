"""The geometry: nearest points, uniform starts, the box."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import optimize, stats
from torch import Tensor

from dat.core.rng import Streams
from dat.core.settings import SettingError
from dat.core.threat import ThreatModel, show_radius

both_norms = pytest.mark.parametrize("norm", ["linf", "l2"])
radii = st.floats(0, 2) | st.sampled_from([0.0, 1 / 255, 8 / 255, 100.0])
shapes = st.tuples(*(st.integers(1, top) for top in (3, 3, 4, 4)))


def draws(count: int, seed: int = 0) -> Streams:
    return Streams.of(seed, "test", index=torch.arange(count))


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=source, dtype=torch.float64)


def pixels(shape: tuple[int, ...], seed: int) -> Tensor:
    """Images of which many pixels are exactly 0 or 1."""
    return (2 * random(shape, seed) - 0.5).clamp(0, 1)


def norms(threat: ThreatModel, delta: Tensor) -> Tensor:
    order = math.inf if threat.norm == "linf" else 2
    norm: Tensor = torch.linalg.vector_norm(delta.flatten(1).double(), order, dim=1)
    return norm


@both_norms
@settings(max_examples=60)
@given(eps=radii, shape=shapes, seed=st.integers(0, 10**6), far=st.floats(0, 10))
def test_projection_is_in_ball_and_box_and_idempotent(
    norm: str, eps: float, shape: tuple[int, ...], seed: int, far: float
) -> None:
    eps = min(eps, 1.0) if norm == "linf" else eps
    threat = ThreatModel(norm=norm, eps=eps)
    x = pixels(shape, seed)
    once = threat.project(x + far * (random(shape, seed + 1) - 0.5), x)
    assert (norms(threat, once - x) <= eps + 1e-9).all()
    assert once.min() >= 0 and once.max() <= 1
    torch.testing.assert_close(threat.project(once, x), once, rtol=0, atol=1e-12)


@both_norms
@settings(max_examples=60)
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
def test_the_random_start_of_a_sample_depends_on_it_alone(norm: str) -> None:
    threat, x = ThreatModel(norm=norm, eps=0.3), pixels((5, 2, 3, 3), 0)
    rows = torch.tensor([4, 1])
    all_ = threat.random_start(x, draws(5))
    assert torch.equal(threat.random_start(x[rows], draws(5).select(rows)), all_[rows])
    assert not torch.equal(threat.random_start(x, draws(5, seed=1)), all_)


@both_norms
def test_boundary_starts_lie_on_the_ball(norm: str) -> None:
    threat, x = ThreatModel(norm=norm, eps=0.2), 0.3 + 0.4 * random((50, 2, 3, 3), 0)
    edge = threat.random_boundary_start(x, draws(50))
    torch.testing.assert_close(threat.size(edge, x), torch.full((50,), 0.2, dtype=torch.float64))


@both_norms
@settings(max_examples=30)
@given(eps=radii, shape=shapes, seed=st.integers(0, 10**6))
def test_boundary_starts_are_in_ball_and_box(
    norm: str, eps: float, shape: tuple[int, ...], seed: int
) -> None:
    eps = min(eps, 1.0) if norm == "linf" else eps
    threat, x = ThreatModel(norm=norm, eps=eps), pixels(shape, seed)
    edge = threat.random_boundary_start(x, draws(shape[0], seed))
    assert (norms(threat, edge - x) <= eps + 1e-9).all()
    assert edge.min() >= 0 and edge.max() <= 1


def test_linf_boundary_starts_are_uniform_except_for_one_pixel() -> None:
    x = torch.full((2000, 1, 2, 2), 0.5, dtype=torch.float64)
    delta = (
        ThreatModel(norm="linf", eps=0.2)
        .random_boundary_start(x, draws(2000))
        .sub(x)
        .div(0.2)
        .flatten(1)
    )
    touches = (delta.abs() > 1 - 1e-9).sum(1)
    assert (touches == 1).all()
    assert abs(delta.mean()) < 0.05
    counts = delta.abs().argmax(1).bincount(minlength=4)
    assert stats.chisquare(counts.numpy()).pvalue > 0.01


def test_l2_boundary_starts_are_uniform_on_the_sphere() -> None:
    x = torch.full((2000, 1, 1, 3), 0.5, dtype=torch.float64)
    delta = (
        ThreatModel(norm="l2", eps=0.2)
        .random_boundary_start(x, draws(2000))
        .sub(x)
        .div(0.2)
        .flatten(1)
    )
    for axis in delta.T:  # on a sphere in space, each coordinate is uniform (Archimedes)
        assert stats.kstest(axis.numpy(), "uniform", args=(-1, 2)).pvalue > 0.01


@both_norms
def test_the_boundary_start_of_a_sample_depends_on_it_alone(norm: str) -> None:
    threat, x = ThreatModel(norm=norm, eps=0.3), pixels((5, 2, 3, 3), 0)
    rows = torch.tensor([4, 1])
    all_ = threat.random_boundary_start(x, draws(5))
    assert torch.equal(threat.random_boundary_start(x[rows], draws(5).select(rows)), all_[rows])
    assert not torch.equal(threat.random_boundary_start(x, draws(5, seed=1)), all_)


@both_norms
def test_per_sample_steps_equal_separate_steps(norm: str) -> None:
    threat, x = ThreatModel(norm=norm, eps=0.3), pixels((4, 2, 3, 3), 0)
    x_adv, gradient = threat.random_start(x, draws(4)), random((4, 2, 3, 3), 1) - 0.5
    steps = torch.tensor([0.0, 0.1, 0.2, 5.0], dtype=torch.float64)
    together = threat.ascend(x_adv, gradient, steps, x)
    for row in torch.arange(4).split(1):
        alone = threat.ascend(x_adv[row], gradient[row], float(steps[row]), x[row])
        torch.testing.assert_close(together[row], alone, rtol=0, atol=1e-15)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_native_step_is_bitwise_identical_to_torchs(
    form: torch.memory_format, dtype: torch.dtype
) -> None:
    """A step for each sample goes through torch, one for all through C where that was compiled."""
    random, threat = torch.Generator().manual_seed(5), ThreatModel(eps=0.07)
    x = torch.rand((6, 3, 5, 7), generator=random, dtype=dtype).contiguous(memory_format=form)
    x_adv = threat.project(x + 0.2 * torch.rand_like(x), x)
    gradient = torch.randn(x.shape, generator=random, dtype=dtype).contiguous(memory_format=form)
    gradient[0, 0], gradient[1, 1], gradient[2] = 0.0, float("nan"), float("inf")
    x_adv[3, 0] = float("nan")
    kept = [tensor.clone() for tensor in (x, x_adv, gradient)]
    stepped = threat.ascend(x_adv, gradient, 0.03, x)
    expected = threat.ascend(x_adv, gradient, torch.full((6,), 0.03, dtype=dtype), x)
    torch.testing.assert_close(stepped, expected, rtol=0, atol=0, equal_nan=True)
    assert stepped.stride() == x.stride()
    torch.testing.assert_close([x, x_adv, gradient], kept, rtol=0, atol=0, equal_nan=True)


def test_ascent_goes_along_the_sign() -> None:
    x = torch.full((1, 1, 1, 3), 0.5)
    gradient = torch.tensor([7.0, -1e-20, 0.0]).reshape_as(x)
    stepped = ThreatModel(norm="linf", eps=0.3).ascend(x, gradient, 0.1, x)
    torch.testing.assert_close(stepped.flatten(), torch.tensor([0.6, 0.4, 0.5]))


def test_ascent_goes_along_the_unit_gradient() -> None:
    x = torch.full((2, 1, 1, 2), 0.5)
    gradient = torch.tensor([[30.0, -40.0], [3e-6, 4e-6]]).reshape_as(x)
    stepped = ThreatModel(norm="l2", eps=0.3).ascend(x, gradient, 0.1, x).flatten(1)
    torch.testing.assert_close(stepped, torch.tensor([[0.56, 0.42], [0.56, 0.58]]))


@both_norms
def test_ascent_along_a_zero_gradient_stays(norm: str) -> None:
    x = pixels((2, 1, 3, 3), 0)
    assert torch.equal(ThreatModel(norm=norm).ascend(x, torch.zeros_like(x), 0.1, x), x)


@both_norms
def test_ascent_ends_on_the_ball(norm: str) -> None:
    threat, x = ThreatModel(norm=norm, eps=0.1), torch.full((3, 1, 2, 2), 0.5)
    stepped = threat.ascend(x, random((3, 1, 2, 2), 0).float() + 0.1, 5.0, x)
    torch.testing.assert_close(threat.size(stepped, x), torch.full((3,), 0.1))


def test_size_is_the_norm() -> None:
    x = torch.zeros(1, 1, 1, 2)
    other = torch.tensor([0.3, -0.4]).reshape_as(x)
    assert ThreatModel(norm="linf").size(other, x).tolist() == pytest.approx([0.4])
    assert ThreatModel(norm="l2").size(other, x).tolist() == pytest.approx([0.5])


@both_norms
def test_length_is_the_norm_of_each_sample(norm: str) -> None:
    threat, delta = ThreatModel(norm=norm), random((5, 2, 3, 3), 0) - 0.5
    torch.testing.assert_close(threat.length(delta), norms(threat, delta))


class Problem:
    """A problem for `step_to_hyperplane`, and its solution by other means."""

    def __init__(self, shape: tuple[int, ...], seed: int, share: float, *, zeros: bool) -> None:
        """`share` is a fraction of the widest gap that the box allows to close."""
        self.x = pixels(shape, seed)
        self.normal = random(shape, seed + 1) - 0.5
        if zeros:
            self.normal *= random(shape, seed + 2) < 0.6
        up = torch.where(self.normal > 0, 1 - self.x, self.x)
        down = torch.where(self.normal < 0, 1 - self.x, self.x)
        room = up if share > 0 else down
        self.gap = share * (self.normal.abs() * room).flatten(1).sum(1)

    def rows(self) -> list[tuple[NDArray[np.float64], NDArray[np.float64], float]]:
        return list(
            zip(
                self.x.flatten(1).numpy(),
                self.normal.flatten(1).numpy(),
                self.gap.tolist(),
                strict=True,
            )
        )


def smallest_linf(x: NDArray[np.float64], normal: NDArray[np.float64], gap: float) -> float:
    """The least s with |d| <= s, as a linear program in d and s."""
    n, eye = len(x), np.eye(len(x))
    one = np.ones((n, 1))
    solution = optimize.linprog(
        np.append(np.zeros(n), 1.0),
        A_ub=np.block([[eye, -one], [-eye, -one]]),
        b_ub=np.zeros(2 * n),
        A_eq=np.append(normal, 0.0)[None],
        b_eq=[gap],
        bounds=[*zip(-x, 1 - x, strict=True), (0, None)],
    )
    assert solution.success
    return float(solution.fun)


def smallest_l2(x: NDArray[np.float64], normal: NDArray[np.float64], gap: float) -> float:
    """By the conditions of Karush, Kuhn and Tucker, d is t * normal clipped to the box."""

    def step(t: float) -> NDArray[np.float64]:
        delta: NDArray[np.float64] = np.clip(t * math.copysign(1, gap) * normal, -x, 1 - x)
        return delta

    def left(t: float) -> float:
        return abs(gap) - abs(float(normal @ step(t)))

    far = 1.0
    while left(far) > 0:
        far *= 2
    return float(np.linalg.norm(step(optimize.brentq(left, 0, far, xtol=1e-14))))


SMALLEST = {"linf": smallest_linf, "l2": smallest_l2}


@both_norms
@settings(max_examples=60)
@given(
    shape=shapes,
    seed=st.integers(0, 10**6),
    share=st.floats(-0.98, 0.98).filter(lambda share: abs(share) > 1e-3),
    zeros=st.booleans(),
)
def test_the_step_to_the_hyperplane_is_the_smallest(
    norm: str, shape: tuple[int, ...], seed: int, share: float, zeros: bool
) -> None:
    problem, threat = Problem(shape, seed, share, zeros=zeros), ThreatModel(norm=norm)
    step = threat.step_to_hyperplane(problem.x, problem.normal, problem.gap)
    closed = (problem.normal * step).flatten(1).sum(1)
    torch.testing.assert_close(closed, problem.gap, rtol=1e-9, atol=1e-12)
    assert (problem.x + step).min() >= -1e-12 and (problem.x + step).max() <= 1 + 1e-12
    for length, row in zip(norms(threat, step).tolist(), problem.rows(), strict=True):
        assert length == pytest.approx(SMALLEST[norm](*row), rel=1e-6, abs=1e-7)


@both_norms
@settings(max_examples=30)
@given(
    shape=shapes,
    seed=st.integers(0, 10**6),
    share=st.floats(1.001, 100) | st.floats(-100, -1.001),
)
def test_a_gap_wider_than_the_box_ends_at_its_corner(
    norm: str, shape: tuple[int, ...], seed: int, share: float
) -> None:
    problem = Problem(shape, seed, share, zeros=False)
    step = ThreatModel(norm=norm).step_to_hyperplane(problem.x, problem.normal, problem.gap)
    corner = (math.copysign(1, share) * problem.normal > 0).double()
    shut = (problem.gap == 0).reshape(-1, 1, 1, 1)  # no room at all, so no gap was asked for
    torch.testing.assert_close(problem.x + step, torch.where(shut, problem.x, corner))


@both_norms
@pytest.mark.parametrize("share", [-1.0, 1.0])
def test_the_widest_gap_that_fits_ends_in_the_corner(norm: str, share: float) -> None:
    problem = Problem((20, 1, 3, 3), 0, share, zeros=False)
    step = ThreatModel(norm=norm).step_to_hyperplane(problem.x, problem.normal, problem.gap)
    closed = (problem.normal * step).flatten(1).sum(1)
    torch.testing.assert_close(closed, problem.gap)
    assert step.isfinite().all()


@both_norms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_step_to_the_hyperplane_is_zero_without_a_gap(norm: str, dtype: torch.dtype) -> None:
    """Where the gap or the normal is zero, the step is zero."""
    x = torch.tensor([0.0, 1.0, 0.5, 0.0, 1.0, 0.5], dtype=dtype).repeat(4, 1).reshape(4, 1, 2, 3)
    normal = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0], dtype=dtype).reshape(1, 1, 2, 3)
    normal = normal * torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=dtype).reshape(-1, 1, 1, 1)
    gap = torch.tensor([0.0, 1.0, -1.0, 0.0], dtype=dtype)
    assert torch.equal(
        ThreatModel(norm=norm).step_to_hyperplane(x, normal, gap), torch.zeros_like(x)
    )


@both_norms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [-1e9, -0.5, -1e-9, 0.0, 1e-9, 0.5, 1e9])
def test_the_step_to_the_hyperplane_from_the_box_is_finite(
    norm: str, dtype: torch.dtype, gap: float
) -> None:
    """Pixels of exactly 0 or 1, with and without a weight."""
    x = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 1.0], dtype=dtype).reshape(1, 1, 2, 3)
    normal = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0, 0.0], dtype=dtype).reshape(1, 1, 2, 3)
    step = ThreatModel(norm=norm).step_to_hyperplane(x, normal, torch.tensor([gap], dtype=dtype))
    assert step.isfinite().all()
    assert (x + step).min() >= 0 and (x + step).max() <= 1
    wanted = max(min(gap, 2.0), -2.0)  # two of the pixels can go the right way
    assert float((normal * step).sum()) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("norm", "scale"),
    [
        ("linf", 1e-8),
        ("linf", 1e8),
        ("l2", 1e-5),
        ("l2", 1e8),
        ("l2", 1e-8),
        ("l2", 1e-20),
        ("l2", 1e20),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_step_to_the_hyperplane_is_scale_invariant(
    norm: str, scale: float, dtype: torch.dtype
) -> None:
    problem, threat = Problem((8, 1, 3, 3), 0, 0.5, zeros=True), ThreatModel(norm=norm)
    x, normal, gap = (value.to(dtype) for value in (problem.x, problem.normal, problem.gap))
    step = threat.step_to_hyperplane(x, normal, gap)
    torch.testing.assert_close(threat.step_to_hyperplane(x, scale * normal, scale * gap), step)


@both_norms
def test_the_step_to_the_hyperplane_of_a_sample_depends_on_it_alone(norm: str) -> None:
    """One sample may take more rounds than another."""
    problem, threat = Problem((30, 1, 4, 4), 5, 0.9, zeros=True), ThreatModel(norm=norm)
    together = threat.step_to_hyperplane(problem.x, problem.normal, problem.gap)
    for row in torch.arange(30).split(1):
        alone = threat.step_to_hyperplane(problem.x[row], problem.normal[row], problem.gap[row])
        torch.testing.assert_close(alone, together[row], rtol=0, atol=1e-12)


@both_norms
def test_arguments_are_left_alone(norm: str) -> None:
    threat, x, x_adv = ThreatModel(norm=norm), pixels((2, 1, 3, 3), 0), random((2, 1, 3, 3), 1)
    copies = x.clone(), x_adv.clone()
    threat.ascend(x_adv, torch.ones_like(x), 0.5, x)
    threat.random_start(x, draws(2))
    threat.random_boundary_start(x, draws(2))
    threat.step_to_hyperplane(x, x_adv, torch.ones(2, dtype=torch.float64))
    assert torch.equal(x, copies[0]) and torch.equal(x_adv, copies[1])


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"eps": -0.1}, "ThreatModel.eps = -0.1: must be at least 0"),
        ({"eps": math.nan}, "ThreatModel.eps = nan: must be at least 0"),
        ({"eps": "wide"}, "ThreatModel.eps = 'wide': must be a number, at least 0"),
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


@pytest.mark.parametrize(
    ("eps", "shown"),
    [
        (8 / 255, "8/255"),
        (0.5 / 255, "0.5/255"),
        (128 / 255, "128/255"),
        (16 / 255 + 1e-9, "16/255"),
        (8.3 / 255, "0.032549"),
        (0.2, "0.2"),
        (0.5, "0.5"),
        (1.0, "1"),
        (0.0, "0"),
        (300.0, "300"),
        (0.031, "0.031"),
        (1 / 3, "85/255"),
    ],
)
def test_radii_are_shown_in_gray_levels_unless_they_are_short_decimals(
    eps: float, shown: str
) -> None:
    assert show_radius(eps) == shown
    assert ThreatModel(norm="l2", eps=shown).eps == pytest.approx(eps, abs=1e-6)  # type: ignore[arg-type]


def test_the_settings_show_the_radius_as_typed() -> None:
    shown = {row.path: row.value for row in ThreatModel(eps=8 / 255).rows()}
    assert shown == {"norm": "linf", "eps": "8/255"}
