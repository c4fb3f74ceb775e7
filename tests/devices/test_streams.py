"""Hand-overs between streams, and between the device and the host, without a GPU.

Each check runs the real code on a device that knows for each operation on which stream it runs and
what it reads and writes (`traced.py`), and fails if two accesses to the same memory are unordered.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.devices import streams_in_process, traced
from tests.workers.forked import run_workers

pytestmark = [  # a compiler runs, once for each version of the sources
    pytest.mark.slow,
    pytest.mark.skipif(bool(traced.missing()), reason=traced.missing()),
]

RUNS: dict[str, dict[str, Any]] = {
    "dense": {},
    "chunked, synchronized batch norm": {
        "protocol": "chunked",
        "quantizer": "bucket 8",
        "bn": "sync",
    },
    "ring, averaged weights": {"protocol": "ring", "quantizer": "bucket 8", "ema": 0.9},
    "hybrid, AWP": {"protocol": "hybrid", "quantizer": "bucket 4", "awp": 0.01},
    "whole vector": {"protocol": "server", "quantizer": "vector 4"},
    "subgroups": {
        "protocol": "gather",
        "quantizer": "tensor 8",
        "objective": "smooth",
        "team": 2,
        "bn": "sync",
    },
    "sharded": {"shard": 4, "quantizer": "bucket 8"},
    "sharded, block by block": {"shard": 4, "gather": "block"},
    "sharded, replicated": {"shard": 2, "quantizer": "bucket 8"},
}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    traced.build()


def check(name: str, *details: Any) -> None:
    run_workers(1, streams_in_process.run, name, *details)


@pytest.mark.parametrize(
    "name",
    [
        "every_protocol_is_ordered",
        "a_future_of_none_is_a_race",
        "a_side_stream_that_does_not_wait_is_a_race",
        "memory_is_not_used_again_too_early",
        "times_are_those_of_the_stream",
        "events_are_read_after_waiting",
        "transfers_end_with_their_collective",
    ],
)
def test_streams(name: str) -> None:
    check(name)


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "backward_through_ddp_is_ordered",
        "batches_stay_until_they_are_copied",
        "checkpoints_are_copied_before_they_are_written",
    ],
)
def test_hand_overs_and_the_same_with_a_planted_fault(name: str, planted: bool) -> None:
    check(name, planted)


@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_training_has_no_races(settings: dict[str, Any], tmp_path: Path) -> None:
    check("training_is_ordered", tmp_path / "checkpoints", settings)
