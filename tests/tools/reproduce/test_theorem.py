"""The problem of Theorem 1: closed forms against autograd and samples, the bound against runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dat.tools.reproduce import theorem
from dat.tools.reproduce.theorem import (
    Problem,
    SolverSettings,
    ascend,
    bound,
    check_theorem,
    constants,
    sample_gradients,
    slope,
    solve,
)

PROBLEM = Problem()
A = PROBLEM.matrix().double()


def places(count: int) -> Tensor:
    random = torch.Generator().manual_seed(1)
    return 6 * torch.rand((count, PROBLEM.size), generator=random, dtype=torch.float64) - 3


def samples(count: int) -> Tensor:
    random = torch.Generator().manual_seed(2)
    shape = (1, count, PROBLEM.size)
    unit = 2 * torch.rand(shape, generator=random, dtype=torch.float64) - 1
    return PROBLEM.centre + PROBLEM.spread * unit


def psi(theta: Tensor) -> Tensor:
    """An independent implementation, to be differentiated by autograd."""
    mean = torch.sin(torch.tensor(PROBLEM.spread)).double() / PROBLEM.spread
    pull = A @ theta.sin() + PROBLEM.shift * PROBLEM.centre
    return (1 - mean * (theta - PROBLEM.centre).cos()).sum() + pull.square().sum() / 2


def test_the_gradient_is_that_of_psi() -> None:
    for theta in places(5):
        theta = theta.requires_grad_()
        value = psi(theta)
        (wanted,) = torch.autograd.grad(value, theta)
        torch.testing.assert_close(PROBLEM.gradient(theta.detach(), A), wanted)
        assert PROBLEM.value(theta.detach(), A) == pytest.approx(float(value.detach()))


def test_samples_give_it_on_average_within_the_variance() -> None:
    known, x = constants(PROBLEM, A, 2), samples(40_000)
    for theta in places(3):
        found = sample_gradients(PROBLEM, SolverSettings(), theta, A, x)[0]
        spread = found.std(0) / len(found) ** 0.5
        assert ((found.mean(0) - PROBLEM.gradient(theta, A)).abs() < 6 * spread).all()
        assert (found.var(0) < 1.02 * torch.tensor(known.sigma2)).all()
        assert found.norm(dim=1).max() < known.largest


def test_the_gradient_is_as_smooth_as_is_said() -> None:
    known = constants(PROBLEM, A, 2)
    for theta in places(5):
        curved = torch.autograd.functional.hessian(psi, theta)
        assert torch.linalg.matrix_norm(curved, 2) <= known.lipschitz


@pytest.mark.parametrize("inner", [1.0, 0.1, 0.01])
def test_the_attack_stops_when_it_is_good_enough(inner: float) -> None:
    target = torch.randn((2, 5, 8), generator=torch.Generator().manual_seed(3))
    found = ascend(target, 1.0, inner)
    left = torch.linalg.vector_norm(target - found, dim=-1)
    assert (left <= inner).all()
    started = torch.linalg.vector_norm(target, dim=-1) > inner
    assert (left[started] > 0.85 * inner).all()  # and stops as soon as it is


def test_the_bound_holds_and_runs_are_alike() -> None:
    run = SolverSettings(steps=64, batch=16, bits=4, inner=0.5)
    known = constants(PROBLEM, A, 1)
    measured = solve(PROBLEM, run, 0)
    assert 0 < measured < bound(PROBLEM, run, known)["bound"]
    assert solve(PROBLEM, run, 0) == measured != solve(PROBLEM, run, 1)


def test_more_steps_samples_and_bits_help() -> None:
    base = SolverSettings(steps=256, batch=64)
    long = solve(PROBLEM, base, 0)
    assert solve(PROBLEM, SolverSettings(steps=64, batch=64), 0) > long
    assert solve(PROBLEM, SolverSettings(steps=256, batch=1, workers=1), 0) > long
    assert solve(PROBLEM, SolverSettings(steps=256, batch=64, bits=2), 0) > long


def test_errors_keep_the_weights_from_the_minimum() -> None:
    near = SolverSettings(steps=256, batch=16, rate=0.1, near=True)
    there = PROBLEM.gradient(PROBLEM.start(0, near=True).double(), A)
    assert float(there.square().sum()) < 1e-10
    exact = solve(PROBLEM, near, 0)
    assert exact < 0.1 * solve(PROBLEM, replace(near, near=False), 0)
    assert solve(PROBLEM, replace(near, batch=1), 0) > 1.5 * exact
    assert solve(PROBLEM, replace(near, bits=2), 0) > 1.5 * exact
    assert solve(PROBLEM, replace(near, inner=0.8), 0) > 1.5 * exact
    known = constants(PROBLEM, A, 1, near=True)
    assert exact < bound(PROBLEM, near, known)["bound"]


def test_a_slope_is_found() -> None:
    xs = [1.0, 2.0, 4.0, 8.0]
    assert slope(xs, [3 * x**-0.5 for x in xs]) == pytest.approx(-0.5)


def test_all_of_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = {
        name: sweep._replace(values=sweep.values[:2], base=SolverSettings(steps=8, batch=2))
        for name, sweep in theorem.SWEEPS.items()
    }
    monkeypatch.setattr(theorem, "SWEEPS", short)
    found = check_theorem(tmp_path, seeds=2, quiet=True)
    assert {it.name for it in (tmp_path / "theorem1").iterdir()} == {
        *("results.json", "table.md", "plot.png", "plot.svg"),
    }
    assert (
        json.loads((tmp_path / "theorem1" / "results.json").read_text())["table"] == found["table"]
    )
    assert [row[0] for row in found["table"]] == ["T", "MB", "M", "b", "inner"]
