"""The exact values of the schedules."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from dat.optim import Constant, Cosine, Cyclic, OneCycle, Piecewise, Schedule


def factors(schedule: Schedule, at: list[float], epochs: int) -> list[float]:
    return [schedule(epoch, epochs) for epoch in at]


@pytest.mark.parametrize(
    ("epochs", "milestones"),
    [
        (30, (20, 25, 28)),  # the paper's, on ImageNet
        (100, (75, 90, 95)),  # and on CIFAR-10
        (200, (150, 180, 190)),
        (70, (52.5, 63, 66.5)),
        (1, (0.75, 0.9, 0.95)),
    ],
)
def test_piecewise_drops_at_the_papers_milestones(
    epochs: int, milestones: tuple[float, ...]
) -> None:
    schedule = Piecewise()
    assert schedule(0, epochs) == 1
    for passed, milestone in enumerate(milestones):
        assert schedule(milestone - 1e-9, epochs) == pytest.approx(0.1**passed)
        assert schedule(milestone, epochs) == pytest.approx(0.1 ** (passed + 1))
    assert schedule(epochs, epochs) == pytest.approx(1e-3)


def test_piecewise_with_custom_milestones() -> None:
    schedule = Piecewise(milestones=(2, 5), factor=0.5)
    assert factors(schedule, [0, 1.9, 2, 4.9, 5, 9], 10) == [1, 1, 0.5, 0.5, 0.25, 0.25]


def test_the_papers_warm_up_is_k_over_5() -> None:
    """Warm-up epoch k uses (k/5) eta, then come the paper's 30 epochs."""
    schedule = Piecewise(warmup=5, milestones=(25, 30, 33))
    for step in (0.0, 0.5, 0.99):
        warmup_factors = factors(schedule, [epoch + step for epoch in range(6)], 35)
        assert warmup_factors == [1 / 5, 2 / 5, 3 / 5, 4 / 5, 1, 1]
    assert factors(schedule, [24.9, 25], 35) == [1, 0.1]


def test_milestones_count_from_the_start_of_the_run() -> None:
    assert factors(Piecewise(warmup=5), [4, 5, 19.9, 20], 30) == [1, 1, 1, 0.1]


def test_warm_up_by_step_is_a_line() -> None:
    schedule = Constant(warmup=2, warmup_by="step")
    assert factors(schedule, [0, 0.5, 1, 1.5, 2, 9], 10) == [0, 0.25, 0.5, 0.75, 1, 1]


def test_warm_up_over_part_of_an_epoch() -> None:
    assert factors(Constant(warmup=1.5), [0, 0.9, 1, 1.4, 2], 10) == [2 / 3, 2 / 3, 1, 1, 1]


def test_cosine() -> None:
    assert factors(Cosine(), [0, 5, 10], 10) == pytest.approx([1, 0.5, 0])
    assert factors(Cosine(final=0.2), [0, 5, 10, 11], 10) == pytest.approx([1, 0.6, 0.2, 0.2])
    after_warmup = factors(Cosine(warmup=2), [0, 1, 2, 6, 10], 10)
    assert after_warmup == pytest.approx([0.5, 1, 1, 0.5, 0])


def test_cyclic_is_a_triangle() -> None:
    assert factors(Cyclic(), [0, 2.5, 5, 7.5, 10, 11], 10) == [0, 0.5, 1, 0.5, 0, 0]
    assert factors(Cyclic(peak_at=0.25), [0, 1, 2, 5, 8], 8) == pytest.approx([0, 0.5, 1, 0.5, 0])


TORCHS: dict[str, Literal["cos", "linear"]] = {"cosine": "cos", "linear": "linear"}


@pytest.mark.parametrize("anneal", TORCHS)
@pytest.mark.parametrize("peak_at", [0.1, 0.3, 0.8])
def test_one_cycle_agrees_with_torchs(peak_at: float, anneal: str) -> None:
    """torch's phases end one step early, at step peak_at * N - 1 and at the last step: at the same
    share of a phase, the rates are the same."""
    steps, schedule = 40, OneCycle(peak_at=peak_at, anneal=anneal)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1.0, total_steps=steps, pct_start=peak_at, anneal_strategy=TORCHS[anneal]
    )
    end = peak_at * steps - 1
    for step in range(steps):
        up, down = step / end, (step - end) / (steps - 1 - end)
        progress = peak_at * up if step < end else peak_at + (1 - peak_at) * down
        rate = optimizer.param_groups[0]["lr"]
        assert schedule(progress * 10, 10) == pytest.approx(rate, rel=1e-9, abs=1e-12)
        optimizer.step()
        theirs.step() if step < steps - 1 else None


def test_one_cycle_in_numbers() -> None:
    linear = OneCycle(anneal="linear", peak_at=0.5, start=0.2, final=0.1)
    assert factors(linear, [0, 2.5, 5, 7.5, 10, 11], 10) == pytest.approx(
        [0.2, 0.6, 1, 0.55, 0.1, 0.1]
    )
    cosine = OneCycle(peak_at=0.5, start=0.2, final=0.0)
    assert factors(cosine, [0, 2.5, 5, 7.5, 10], 10) == pytest.approx([0.2, 0.6, 1, 0.5, 0])


def test_constant() -> None:
    assert factors(Constant(), [0, 3.3, 10], 10) == [1, 1, 1]
