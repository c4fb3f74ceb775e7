"""What is planned is what real workers do: the same buckets, the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dat.comm import protocol_name
from dat.planning import predict
from dat.planning.costs import JOBS, fingerprint, load, read
from dat.planning.gradient import CAP, FIRST, Gradient, slots_of, statistics_of, watch_backward
from tests.distributed.forked import run_workers
from tests.planning import in_workers
from tests.planning.cases import FREE, NOTHING, cluster
from tests.planning.in_workers import CASES

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
    quiet = Gradient(gradient.slots, gradient.ready)  # without what is told beside
    found = predict(
        quiet,
        NOTHING,
        protocol=protocol_name(protocol),
        quantizer=quantizer,
        cluster=cluster(WORKERS),
        costs=FREE,
    )
    counted = [rank[name]["sent"] for rank in seen]
    assert found.sent == sum(counted)
    # of the server's two directions the ledger counts what is sent
    assert found.busiest == max(counted)


@pytest.mark.parametrize("name", ["dense", "gather vector", "chunked"])
def test_buckets_are_ddps(seen: list[dict[str, Any]], gradient: Gradient, name: str) -> None:
    whole = name == "gather vector"
    told = [{tuple(it) for it in bucket} for bucket in seen[0][name]["buckets"]]
    found = gradient.buckets(whole=whole)
    assert [{(it.position, it.length) for it in bucket.slots} for bucket in found] == told
    assert len(found) == (1 if whole else 2)
    assert found[-1].ready <= 1


def test_a_gradient_is_cut_as_torch_cuts_it() -> None:
    random = torch.Generator().manual_seed(0)
    sizes = [int(it) for it in torch.randint(1, 3_000_000, (60,), generator=random)]
    tensors = [torch.empty(size, device="meta") for size in sizes]
    cut = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    told, _ = cut(tensors, [FIRST, CAP])
    slots = list(slots_of(torch.nn.ParameterList(tensors)).values())
    found = Gradient(tuple(slots), (1.0,) * len(slots)).buckets()
    assert [[slots.index(slot) for slot in bucket.slots] for bucket in found] == told


def test_statistics_travel_too(gradient: Gradient) -> None:
    network = in_workers.network()
    buffers = [it for name, it in network.named_buffers() if "running" in name]
    assert statistics_of(network) == sum(it.numel() for it in buffers)
    assert gradient.told == 5 + statistics_of(network)


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
