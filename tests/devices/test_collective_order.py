"""The workers' collectives match, in whatever order their threads run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from dat.distributed import CONCRETE_PROTOCOLS
from tests.devices import order_in_process, traced
from tests.devices.echo_group import Collective
from tests.devices.order import deadlock, first_mismatch
from tests.workers.forked import run_workers

STAGED = [name for name, protocol in CONCRETE_PROTOCOLS.items() if protocol.staged]


def of(group: str, *members: int, operation: str = "all_reduce", values: int = 1) -> Collective:
    return Collective(group, operation, values, members, "MainThread")


def test_the_same_order_on_all_workers_is_neither_mismatch_nor_deadlock() -> None:
    logs = {
        0: [of("all", 0, 1, 2), of("pair", 0, 1), of("all", 0, 1, 2)],
        1: [of("all", 0, 1, 2), of("pair", 0, 1), of("all", 0, 1, 2)],
        2: [of("all", 0, 1, 2), of("all", 0, 1, 2)],
    }
    assert first_mismatch(logs) == deadlock(logs) == ""


def test_two_groups_in_different_orders_wait_for_each_other() -> None:
    first, second = of("a", 0, 1), of("b", 0, 1)
    logs = {0: [first, second], 1: [second, first]}
    assert first_mismatch(logs) == ""
    assert deadlock(logs) == (
        "worker 0 waits for all_reduce of 1 in group a (MainThread); "
        "worker 1 waits for all_reduce of 1 in group b (MainThread)"
    )


def test_a_ring_of_groups_waits_forever() -> None:
    logs = {
        0: [of("a", 0, 1), of("c", 0, 2)],
        1: [of("b", 1, 2), of("a", 0, 1)],
        2: [of("c", 0, 2), of("b", 1, 2)],
    }
    assert first_mismatch(logs) == ""
    assert deadlock(logs)


def test_a_group_with_different_collectives_is_a_mismatch() -> None:
    assert first_mismatch({0: [of("a", 0, 1)], 1: [of("a", 0, 1, values=2)]})
    assert first_mismatch({0: [of("a", 0, 1)], 1: []})


def test_sends_and_receives_of_a_batch_may_be_in_any_order() -> None:
    there = of("a", 0, 1, operation="send"), of("a", 0, 1, operation="recv")
    back = of("a", 1, 0, operation="send"), of("a", 1, 0, operation="recv")
    assert deadlock({0: [there[0], back[1]], 1: [back[0], there[1]]}) == ""
    assert deadlock({0: [there[0], of("b", 0, 1), back[1]], 1: [back[0], of("b", 0, 1), there[1]]})


@pytest.mark.parametrize("protocol", STAGED)
def test_lanes_issue_the_collectives_of_a_group_in_one_order(protocol: str, tmp_path: Path) -> None:
    logs = order_in_process.issued_by_all(tmp_path, order_in_process.CPU, protocol=protocol)
    assert first_mismatch(logs) == ""
    threads = [{issued.thread for issued in log} for log in logs.values()]
    assert all(len(names) > 1 for names in threads)  # a lane's own among them


@pytest.mark.parametrize(
    "planted",
    [
        order_in_process.lanes_share_a_group,
        order_in_process.the_writer_of_checkpoints_waits_for_the_others,
    ],
)
def test_planted_faults_are_found(planted: Any, tmp_path: Path) -> None:
    fault: AbstractContextManager[None] = planted()
    with fault:
        logs = order_in_process.issued_by_all(tmp_path, order_in_process.CPU, protocol="ring")
    assert first_mismatch(logs)


accelerated = [  # a compiler runs, once for each version of the sources
    pytest.mark.slow,
    pytest.mark.skipif(bool(traced.missing()), reason=traced.missing()),
]
cases = [pytest.param({"protocol": name}, id=name, marks=accelerated) for name in STAGED]
sharded = [pytest.param({"shard": 4}, id="sharded", marks=accelerated)]


@pytest.mark.parametrize("given", [*cases, *sharded])
def test_accelerators_take_collectives_in_the_order_of_the_program(
    given: dict[str, Any], tmp_path: Path
) -> None:
    check = "accelerators_take_the_program_s_order"
    run_workers(1, order_in_process.run, check, tmp_path, given)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("a_thread_on_accelerators_is_a_deadlock", marks=accelerated),
        pytest.param("a_collective_of_the_writer_is_found", marks=accelerated),
    ],
)
def test_planted_faults_are_found_on_accelerators(fault: str, tmp_path: Path) -> None:
    run_workers(1, order_in_process.run, fault, tmp_path)
