"""Training in float16 on several workers: an overflow on one of them skips the step on all."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from tests.workers import half_in_workers
from tests.workers.forked import run_workers
from tests.workers.half_in_workers import AT, EXCHANGES, STEPS, VALUES, WORKERS, runs

RUNS = runs()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each worker has seen, by run."""
    folder = tmp_path_factory.mktemp("half")
    run_workers(WORKERS, half_in_workers.main, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORKERS)]


@pytest.mark.parametrize("name", RUNS)
def test_an_overflow_on_one_worker_skips_the_step_on_all(
    results: list[dict[str, Any]], name: str
) -> None:
    """Wherever it happens: in the gradient of a weight, of the logits, or of an image."""
    planted = RUNS[name]["place"] is not None
    for worker in results:
        result = worker[name]
        skipped = [step == AT and planted for step in range(STEPS)]
        assert result["skipped"] == skipped
        assert result["scales"] == [2.0 ** (16 - any(skipped[: n + 1])) for n in range(STEPS)]
        unchanged = [before == after for before, after in pairwise(result["weights"])]
        assert unchanged == skipped


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", EXCHANGES)
def test_no_protocol_hides_a_value_that_is_not_finite(
    results: list[dict[str, Any]], name: str, value: float
) -> None:
    for worker in results:
        assert worker["finite"][name][str(value)] is (value == 1.0)


@pytest.mark.parametrize("name", [name for name in RUNS if "shard" not in RUNS[name]])
def test_replicas_stay_identical_to_the_bit(results: list[dict[str, Any]], name: str) -> None:
    first, *others = (worker[name]["weights"] for worker in results)
    assert all(weights == first for weights in others)
