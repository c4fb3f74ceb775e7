"""Predictions against real workers: the same buckets, the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dat.distributed import protocol_name
from dat.tools.planning import predict
from dat.tools.planning.costs import JOBS, fingerprint, load, read
from dat.tools.planning.gradient import (
    CAP,
    FIRST,
    Gradient,
    slots_of,
    statistics_of,
    watch_backward,
)
from tests.tools.planning import in_workers
from tests.tools.planning.cases import FREE, NOTHING, cluster
from tests.tools.planning.in_workers import CASES
from tests.workers.forked import run_workers

WORKERS = 3


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("seen")
    run_workers(WORKERS, in_workers.main, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORKERS)]


@pytest.fixture(scope="module")
def gradient() -> Gradient:
    return watch_backward(
        in_workers.network(), in_workers.images(), lambda it: it.square().mean(), repeats=1
    )


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_that_the_ledger_counts(
    seen: list[dict[str, Any]], gradient: Gradient, name: str
) -> None:
    quantizer, protocol = CASES[name]
    alone = Gradient(gradient.slots, gradient.ready)  # without metrics and statistics
    found = predict(
        alone,
        NOTHING,
        protocol=protocol_name(protocol),
        quantizer=quantizer,
        cluster=cluster(WORKERS),
        costs=FREE,
    )
    counted = [rank[name]["sent"] for rank in seen]
    assert found.sent == sum(counted)
    # the ledger counts what the server sends, not what it receives
    assert found.busiest == max(counted)


@pytest.mark.parametrize("name", ["dense", "gather vector", "chunked"])
def test_buckets_are_ddps(seen: list[dict[str, Any]], gradient: Gradient, name: str) -> None:
    whole = name == "gather vector"
    real = [{tuple(slot) for slot in bucket} for bucket in seen[0][name]["buckets"]]
    planned = gradient.buckets(whole=whole)
    assert [{(s.position, s.length) for s in bucket.slots} for bucket in planned] == real
    assert len(planned) == (1 if whole else 2)
    assert planned[-1].ready <= 1


def test_buckets_are_assigned_as_by_torch() -> None:
    random = torch.Generator().manual_seed(0)
    sizes = [int(it) for it in torch.randint(1, 3_000_000, (60,), generator=random)]
    tensors = [torch.empty(size, device="meta") for size in sizes]
    assign = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    expected, _ = assign(tensors, [FIRST, CAP])
    slots = list(slots_of(torch.nn.ParameterList(tensors)).values())
    buckets = Gradient(tuple(slots), (1.0,) * len(slots)).buckets()
    assert [[slots.index(slot) for slot in bucket.slots] for bucket in buckets] == expected


def test_statistics_are_exchanged_too(gradient: Gradient) -> None:
    network = in_workers.network()
    buffers = [it for name, it in network.named_buffers() if "running" in name]
    assert statistics_of(network) == sum(it.numel() for it in buffers)
    assert gradient.extra_values == 5 + statistics_of(network)


def test_a_machine_can_be_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tmp_path / "dat" / "costs.json"
    result.parent.mkdir()
    run_workers(2, in_workers.calibrate, result)
    found = read(result)
    assert found.machine == fingerprint()
    assert found.origin.startswith("measured between two workers")
    assert all(it > 0 for job in JOBS for it in found.kernels[job].values())
    for name in ("byte", "stream", "ring_byte", "ring_stream", "message", "latency"):
        assert 0 < getattr(found, name) < 1, name
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load() == found
