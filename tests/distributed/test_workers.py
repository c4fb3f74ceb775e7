"""Three real workers, seen from inside."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.distributed import in_workers
from tests.distributed.forked import run_workers

pytestmark = pytest.mark.alone

WORKERS = 3


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each worker saw."""
    folder = tmp_path_factory.mktemp("seen")
    run_workers(WORKERS, in_workers.main, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORKERS)]


def test_replicas_with_batch_normalisation_stay_identical(seen: list[dict[str, Any]]) -> None:
    assert len({worker["bn_replicas"]["digest"] for worker in seen}) == 1


def test_every_byte_is_counted(seen: list[dict[str, Any]]) -> None:
    """Gradients in a ring, plus four notes and the statistics from everyone to everyone."""
    found = seen[0]["bn_replicas"]
    gradients = 2 * (WORKERS - 1) * 4 * found["parameters"]
    notes = WORKERS * (WORKERS - 1) * 4 * (4 + found["statistics"])
    assert found["mb_per_step"] == pytest.approx((gradients + notes) / 1e6, rel=1e-4)


def test_time_is_measured(seen: list[dict[str, Any]]) -> None:
    found = seen[0]["bn_replicas"]
    assert 0 < found["comm_seconds"] < found["seconds"]
    assert 0 < found["exposed_seconds"] < found["seconds"]


def test_statistics_are_those_of_the_union(seen: list[dict[str, Any]]) -> None:
    for worker in seen:
        assert worker["statistics_of_the_union"]["mean"] < 1e-5
        assert worker["statistics_of_the_union"]["var"] < 1e-5


def test_attacks_cause_no_communication(seen: list[dict[str, Any]]) -> None:
    for worker in seen:
        short, long = worker["attack_is_silent"]["sent"]
        assert short == long > 0


def test_workers_draw_from_disjoint_parts(seen: list[dict[str, Any]]) -> None:
    drawn = [set(worker["attack_is_silent"]["drawn"]) for worker in seen]
    assert set().union(*drawn) == set(range(24))
    assert sum(map(len, drawn)) == 24


def test_the_exchange_begins_before_the_backward_ends(seen: list[dict[str, Any]]) -> None:
    for worker in seen:
        assert worker["overlap"]["buckets"] >= 2
        assert worker["overlap"]["head_start"] > 0  # before the first layer has its gradient


def test_bytes_agree_with_the_kernel(seen: list[dict[str, Any]]) -> None:
    """Loopback carries every worker's bytes, with TCP/IP headers and acknowledgements on top."""
    counted = sum(worker["bytes_on_the_wire"]["counted"] for worker in seen)
    carried = seen[0]["bytes_on_the_wire"]["seen"]
    assert counted == pytest.approx(carried, rel=0.03)


def test_an_error_at_one_worker_stops_all(seen: list[dict[str, Any]]) -> None:
    for rank, worker in enumerate(seen):
        assert worker["failures"]["said"] == ["worker 2: no such thing", "wrong for all"]
        assert worker["failures"]["fine"] == rank


def test_averaged_weights_are_the_same_everywhere(seen: list[dict[str, Any]]) -> None:
    assert len({json.dumps(worker["averaged_weights"]) for worker in seen}) == 1
    assert len(set(seen[0]["averaged_weights"].values())) == 2


def test_an_exchange_with_a_lost_worker_fails(seen: list[dict[str, Any]]) -> None:
    assert seen[2]["lost_peer"] == "left"
    for worker in seen[:2]:
        assert worker["lost_peer"] != "nothing was raised"
