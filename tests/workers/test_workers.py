"""Three real workers: replicas, running statistics, traffic, and errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.workers import in_workers
from tests.workers.forked import run_workers

WORKERS = 3
EXITS_AFTER_COLLECTIVES = """
import sys
import torch
import torch.distributed as dist
from dat.distributed.world import World

dist.init_process_group("gloo")
kept = dist.group.WORLD
sys.setswitchinterval(30)
world = World.join(device="cpu")
for _ in range(20):
    world.sum(torch.ones(4))
    world.gather(torch.ones(4))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each worker."""
    folder = tmp_path_factory.mktemp("results")
    run_workers(WORKERS, in_workers.main, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORKERS)]


def test_replicas_with_batch_normalisation_stay_identical(results: list[dict[str, Any]]) -> None:
    assert len({worker["bn_replicas"]["digest"] for worker in results}) == 1


def test_every_byte_is_counted(results: list[dict[str, Any]]) -> None:
    """A ring all-reduce of the gradients, and an all-gather of four numbers and the running
    statistics."""
    result = results[0]["bn_replicas"]
    gradients = 2 * (WORKERS - 1) * 4 * result["parameters"]
    stats = WORKERS * (WORKERS - 1) * 4 * (4 + result["statistics"])
    assert result["mb_per_step"] == pytest.approx((gradients + stats) / 1e6, rel=1e-4)


def test_shared_matrices_give_the_same_bits_and_are_counted(results: list[dict[str, Any]]) -> None:
    """Each worker sends as much as the busiest, which has at least the largest matrix."""
    assert len({run[0] for worker in results for run in worker["shared_muon"]["runs"]}) == 1
    for worker in results:
        result = worker["shared_muon"]
        (_, shared), (_, alone) = result["runs"]
        sent = (shared - alone) * 1e6 / (WORKERS * (WORKERS - 1) * 4)
        assert result["largest"] <= round(sent) < result["all"]


def test_time_is_measured(results: list[dict[str, Any]]) -> None:
    result = results[0]["bn_replicas"]
    assert 0 < result["comm_seconds"] < result["seconds"]
    assert 0 < result["exposed_seconds"] < result["seconds"]


@pytest.mark.parametrize("shares", ["running_statistics", "uneven_statistics"])
def test_running_statistics_are_those_of_the_global_batch(
    results: list[dict[str, Any]], shares: str
) -> None:
    for worker in results:
        assert worker[shares]["mean"] < 1e-5
        assert worker[shares]["var"] < 1e-5


def test_attacks_cause_no_communication(results: list[dict[str, Any]]) -> None:
    for worker in results:
        short, long = worker["attack_traffic"]["sent"]
        assert short == long > 0


def test_workers_draw_disjoint_images(results: list[dict[str, Any]]) -> None:
    drawn = [set(worker["attack_traffic"]["drawn"]) for worker in results]
    assert set().union(*drawn) == set(range(24))
    assert sum(map(len, drawn)) == 24


@pytest.mark.alone
def test_communication_overlaps_with_the_backward_pass(results: list[dict[str, Any]]) -> None:
    for worker in results:
        assert worker["overlap"]["buckets"] >= 2
        assert worker["overlap"]["head_start"] > 0  # before the gradient of the first layer


@pytest.mark.alone
def test_byte_counts_agree_with_the_kernels(results: list[dict[str, Any]]) -> None:
    """The loopback interface also counts TCP/IP headers and acknowledgements."""
    counted = sum(worker["bytes_on_the_wire"]["counted"] for worker in results)
    assert counted == pytest.approx(results[0]["bytes_on_the_wire"]["loopback"], rel=0.03)


def test_an_error_on_one_worker_is_raised_on_all(results: list[dict[str, Any]]) -> None:
    for rank, worker in enumerate(results):
        assert worker["failures"]["messages"] == ["worker 2: no such thing", "wrong for all"]
        assert worker["failures"]["result"] == rank


def test_averaged_weights_are_the_same_on_all_workers(results: list[dict[str, Any]]) -> None:
    assert len({json.dumps(worker["averaged_weights"]) for worker in results}) == 1
    assert len(set(results[0]["averaged_weights"].values())) == 2


def test_a_collective_with_a_lost_worker_fails(results: list[dict[str, Any]]) -> None:
    assert results[2]["lost_peer"] == "left"
    for worker in results[:2]:
        assert worker["lost_peer"] != "nothing was raised"


@pytest.mark.slow
def test_a_script_may_exit_right_after_a_collective(tmp_path: Path) -> None:
    """The process group outlives `destroy_process_group`, as with DistributedDataParallel. The main
    thread keeps the GIL, so that gloo's thread gets it too late."""
    script = tmp_path / "script.py"
    script.write_text(EXITS_AFTER_COLLECTIVES)
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = subprocess.run(
        [sys.executable, "-m", *launch, str(script)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
