"""What every protocol of the registry must keep to, those that are added later included."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from dat.distributed import CONCRETE_PROTOCOLS, PROTOCOLS, Default, protocol_name
from dat.distributed.phases import PlannedBucket, PlannedExchange
from tests.distributed import in_workers
from tests.distributed.in_workers import GRADIENTS, NODES, QUANTIZERS, Nodes, cases
from tests.workers.forked import run_workers

EQUAL_STRETCHES = ("hybrid",)
"""Planned as if a bucket could always be cut evenly."""
ACCURATE = {"floats": 1e-3, "bucket 8": 0.05}
"""Quantizers that hardly change a sum, and the relative error that they may have."""


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each worker, by case and gradient."""
    folder = tmp_path_factory.mktemp("protocols")
    run_workers(NODES.workers, in_workers.main, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NODES.workers)]


def planned(protocol: str, quantizer: str, gradient: str, nodes: Nodes = NODES) -> PlannedExchange:
    slots = tuple(GRADIENTS[gradient])
    bucket = PlannedBucket(slots, QUANTIZERS[quantizer], nodes, lambda kernel, bits: 1e-9)
    return CONCRETE_PROTOCOLS[protocol]().phases(bucket)


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize(("protocol", "quantizer"), cases())
def test_phases_announce_the_bytes_that_the_ledger_counts(
    observed: list[dict[str, Any]], protocol: str, quantizer: str, gradient: str
) -> None:
    """Of all workers, of the busiest one, and of those that leave the busiest node."""
    plan = planned(protocol, quantizer, gradient)
    counted = [worker[f"{protocol} {quantizer}"][gradient] for worker in observed]
    sent, between = ([entry[kind] for entry in counted] for kind in ("sent", "between"))
    starts = range(0, NODES.workers, NODES.devices)
    leaving = [sum(between[start : start + NODES.devices]) for start in starts]
    egress = sum(phase.egress for phase in (*plan.collect, *plan.spread))
    if gradient == "uneven" and protocol in EQUAL_STRETCHES:
        assert (plan.sent, plan.busiest) == pytest.approx((sum(sent), max(sent)), rel=0.1)
        assert egress == pytest.approx(max(leaving), rel=0.4)
    else:
        assert (plan.sent, plan.busiest, egress) == (sum(sent), max(sent), max(leaving))


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize(("protocol", "quantizer"), cases())
def test_all_workers_get_the_same_sum(
    observed: list[dict[str, Any]], protocol: str, quantizer: str, gradient: str
) -> None:
    sums = [worker[f"{protocol} {quantizer}"][gradient] for worker in observed]
    assert len({entry["digest"] for entry in sums}) == 1
    assert sums[0]["error"] < ACCURATE.get(quantizer, float("inf"))


@pytest.mark.parametrize(("protocol", "quantizer"), cases())
def test_one_worker_sends_nothing(protocol: str, quantizer: str) -> None:
    plan = planned(protocol, quantizer, "uneven", Nodes(nodes=1, devices=1))
    assert (plan.sent, plan.busiest) == (0, 0)
    for phase in (*plan.collect, *plan.spread):
        assert phase.egress == phase.ingress == phase.intra_node == phase.worker_bytes == 0
        assert phase.hops == phase.messages == 0


def test_every_protocol_accepts_a_quantizer() -> None:
    assert {protocol for protocol, _ in cases()} == CONCRETE_PROTOCOLS.keys()


@pytest.mark.parametrize("name", CONCRETE_PROTOCOLS)
def test_a_protocol_is_in_the_file_of_its_name(name: str) -> None:
    kind = CONCRETE_PROTOCOLS[name]
    assert kind.__module__ == f"dat.distributed.protocols.{name}"
    assert protocol_name(kind()) == name


def test_default_and_auto_stand_for_another_protocol() -> None:
    assert PROTOCOLS.keys() - CONCRETE_PROTOCOLS.keys() == {"default", "auto"}
    with pytest.raises(NotImplementedError):
        Default().phases(PlannedBucket((), QUANTIZERS["floats"], NODES, lambda kernel, bits: 0.0))


def test_settings_and_phases_need_no_torch() -> None:
    program = """
import sys
from dat.distributed import CONCRETE_PROTOCOLS, Buckets
from dat.distributed.phases import PlannedBucket
from dat.distributed.wire_format import Slot

class Nodes:
    nodes = devices = together = 2
    workers = 4
    shared = False

for kind in CONCRETE_PROTOCOLS.values():
    bucket = PlannedBucket((Slot((8, 512), 0),), Buckets(bits=8), Nodes(), lambda *kernel: 1e-9)
    assert kind().phases(bucket).sent > 0
sys.exit(", ".join(name for name in ("torch", "numpy") if name in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == ""
