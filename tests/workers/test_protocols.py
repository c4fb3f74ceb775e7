"""The protocols between real workers: correct sums, identical replicas, exact byte counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dat.distributed import Buckets
from dat.distributed.wire_format import chunk_layouts, spans
from tests.workers import exchanges_in_workers
from tests.workers.conftest import DAT, distance, run
from tests.workers.exchanges_in_workers import LENGTH, STEPS, buckets, cases
from tests.workers.forked import run_workers
from tests.workers.training_in_workers import train_all

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Results]:
    """The results of each of M workers."""

    @cache
    def results(workers: int) -> Results:
        folder = tmp_path_factory.mktemp(f"protocols{workers}")
        run_workers(workers, exchanges_in_workers.main, folder)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(workers)]

    return results


WORKERS = (1, 2, 3, 5)
NAMES = tuple(cases(1))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", NAMES)
def test_the_sum_is_the_simulated_one(
    results_of: Callable[[int], Results], workers: int, name: str
) -> None:
    """Exactly, however the gradient is divided and whoever sums; a ring sums in its own order."""
    result = results_of(workers)[0]["every_protocol"][name]
    exact = not name.startswith(("dense", "ring"))
    assert result["error"] <= (0 if exact else 1e-6 * result["scale"])


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", NAMES)
def test_replicas_are_identical_to_the_bit(
    results_of: Callable[[int], Results], workers: int, name: str
) -> None:
    assert len({worker["every_protocol"][name]["digest"] for worker in results_of(workers)}) == 1


@pytest.mark.parametrize("workers", WORKERS)
def test_who_the_server_is_does_not_matter(
    results_of: Callable[[int], Results], workers: int
) -> None:
    results = results_of(workers)[0]["every_protocol"]
    digests = {name: result["digest"] for name, result in results.items()}
    assert digests["server first"] == digests["server last"] == digests["chunked"]
    assert digests["server feedback"] == digests["chunked feedback"]
    assert digests["chunked"] != digests["chunked feedback"]
    assert digests["hybrid"] == digests["chunked"]  # every worker is a node of its own


@pytest.mark.parametrize("workers", WORKERS)
def test_byte_counts_are_exact(results_of: Callable[[int], Results], workers: int) -> None:
    results = [worker["every_protocol"] for worker in results_of(workers)]
    others = workers - 1

    def sent(name: str) -> list[int]:
        return [worker[name]["sent"] for worker in results]

    for name in NAMES:
        whole = STEPS * sum(results[0][name]["sizes"])
        quantizer, _ = cases(workers)[name]
        if name.startswith("gather") and not quantizer.whole:
            assert sent(name) == [others * whole] * workers
        if name.startswith("server"):
            server = 0 if name == "server first" else workers - 1
            assert sent(name) == [others * whole if r == server else whole for r in range(workers)]
        if name in ("hybrid", "chunked", "chunked 32", "chunked feedback"):
            chunks = [
                chunk_layouts(spans(bucket, quantizer), quantizer, workers) for bucket in buckets()
            ]
            largest = sum(max(chunk.size for chunk in bucket) for bucket in chunks)
            assert sent(name) == [2 * others * STEPS * largest] * workers
        if name.startswith("ring"):
            assert sum(sent(name)) == pytest.approx(2 * others * whole, abs=12 * workers * STEPS)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", NAMES)
def test_only_the_values_that_are_not_finite_are_affected(
    results_of: Callable[[int], Results], workers: int, name: str
) -> None:
    """So that errors can name the parameter: other values of the same group stay finite."""
    for worker in results_of(workers):
        assert worker["non_finite_values"][name] == [3, 1700]


@pytest.mark.parametrize("workers", WORKERS)
def test_other_precisions_and_many_buckets(
    results_of: Callable[[int], Results], workers: int
) -> None:
    results = results_of(workers)
    for worker in results:
        assert worker["double_precision"] == {"dtype": "torch.float64", "same": True}
        assert worker["many_buckets"] == results[0]["many_buckets"]
        assert len(set(worker["many_buckets"])) == 4  # every step rounds differently
        assert worker["automatic"] == results[0]["automatic"]
        for message in worker["failing_stage"]:
            assert "no room" in message
        assert len(worker["failing_stage"]) == 2
        assert worker["leaked_threads"] == 0
        assert worker["defaults"] == [["dense", 32], ["chunked", 4], ["gather", 8], ["gather", 8]]
    if workers == 1:
        assert results[0]["automatic"] == ["Dense", 32]


@pytest.mark.parametrize("workers", WORKERS)
def test_all_workers_wait_until_every_group_is_created(
    results_of: Callable[[int], Results], workers: int
) -> None:
    created, _ = results_of(workers)[0]["group_creation"]
    assert all(worker["group_creation"][1] >= created for worker in results_of(workers))


@pytest.fixture(scope="module")
def on_nodes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Results]:
    """The results of each of M workers with `hybrid`."""

    @cache
    def results(workers: int) -> Results:
        folder = tmp_path_factory.mktemp(f"nodes{workers}")
        run_workers(workers, exchanges_in_workers.nodes, folder)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(workers)]

    return results


LAYOUTS = [(4, 1), (4, 2), (4, 4), (6, 1), (6, 2), (6, 3), (6, 6)]
"""Workers, and workers per node."""


@pytest.mark.parametrize(("workers", "inside"), LAYOUTS)
def test_hybrid_sums_floats_within_and_quantized_values_between_nodes(
    on_nodes: Callable[[int], Results], workers: int, inside: int
) -> None:
    """The simulated sum to the bit, near the exact one, and the same on every worker."""
    results = [worker["layouts"] for worker in on_nodes(workers)]
    for quantizer, error in (("32", 1e-6), ("4", 0.3), ("feedback", torch.inf), ("tensor", 0.5)):
        name = f"{inside} {quantizer}"
        if quantizer != "tensor":  # chunks divide its groups, which changes the noise
            assert results[0][name]["error"] == 0
        assert results[0][name]["relative"] < error
        assert len({worker[name]["digest"] for worker in results}) == 1


@pytest.mark.parametrize(("workers", "inside"), LAYOUTS)
def test_bytes_inside_and_between_nodes(
    on_nodes: Callable[[int], Results], workers: int, inside: int
) -> None:
    """Between nodes: each of M chunks to p - 1 nodes and back. Inside a node: every worker sends
    its neighbors their parts and, after the sum, its own; 2 p (q - 1) 4 d in total."""
    nodes, quantizers = workers // inside, {"32": Buckets(), "4": Buckets(bits=4)}
    for name, quantizer in quantizers.items():
        results = [worker["layouts"][f"{inside} {name}"] for worker in on_nodes(workers)]
        chunks = [chunk_layouts(spans(slots, quantizer), quantizer, workers) for slots in buckets()]
        largest = sum(max(chunk.size for chunk in bucket) for bucket in chunks)
        assert {result["between"] for result in results} == {2 * (nodes - 1) * STEPS * largest}
        within = sum(result["sent"] - result["between"] for result in results)
        assert within == 2 * nodes * (inside - 1) * 4 * LENGTH * STEPS


@pytest.mark.parametrize("workers", [4, 6])
def test_hybrid_sums_buckets_with_fewer_values_than_workers(
    on_nodes: Callable[[int], Results], workers: int
) -> None:
    total = sum(range(workers))
    for worker in on_nodes(workers):
        for values in worker["tiny_buckets"]:
            assert values == pytest.approx([total] * len(values), rel=0.02)


@pytest.mark.parametrize("workers", [4, 6])
def test_the_sum_of_hybrid_is_unbiased(on_nodes: Callable[[int], Results], workers: int) -> None:
    """256 squared standard errors have mean 1 and standard deviation sqrt(2 / 256)."""
    assert on_nodes(workers)[0]["bias"] < 1 + 5 * (2 / 256) ** 0.5


@pytest.mark.parametrize("workers", [4, 6])
def test_subgroups_exchange_rows_in_one_batch(
    on_nodes: Callable[[int], Results], workers: int
) -> None:
    assert all(worker["one_batch"] for worker in on_nodes(workers))


@pytest.mark.parametrize("workers", [4, 6])
def test_hybrid_uses_the_launchers_nodes(on_nodes: Callable[[int], Results], workers: int) -> None:
    for worker in on_nodes(workers):
        inside, message = worker["launched_nodes"]
        assert inside == workers // 2
        assert f"the same number of workers, not 1, {workers - 1}; set protocol.inside" in message


def test_training_is_repeatable_and_the_same_for_both_two_sided_protocols(tmp_path: Path) -> None:
    protocols = {
        "chunked": (),
        "again": (),
        "server": ("protocol.name=server", "protocol.rank=2"),
        "hybrid": ("protocol.name=hybrid", "protocol.inside=1"),
        "gather": ("protocol.name=gather",),
    }
    runs = {name: ("quantizer.bits=4", *words) for name, words in protocols.items()}
    trained = train_all(3, tmp_path, runs)
    for name in ("again", "server", "hybrid"):
        assert distance(trained["chunked"], trained[name]) == 0
    assert distance(trained["chunked"], trained["gather"]) > 0


def test_the_error_names_the_parameter_with_a_nan_gradient(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        """
import os, torch
from torch import nn

class Broken(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, grad):
        grad = grad.clone()
        if os.environ["RANK"] == "1":
            grad.view(-1)[17] = float("nan")
        return grad

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, classes)

    def forward(self, x):
        first = Broken.apply(self.first.weight) if self.training else self.first.weight
        return self.second(torch.relu(nn.functional.linear(x.flatten(1), first, self.first.bias)))
"""
    )
    words = (
        "model.name=mine:Net",
        "attack.name=none",
        "evaluate.report=0",
        "train.epochs=1",
        "quantizer.bits=4",
    )
    result = run([*DAT, "train", "digits", *words, "--workers", "2", "--out", "out"], tmp_path)
    assert result.returncode == 3, result.stderr
    assert "the gradient of net.first.weight is not finite" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("quantizer.bits=9",), "quantizer.bits = 9: must be one of 2, 3, 4, 5, 6, 7, 8, 16, 32"),
        (("protocol.name=dense", "quantizer.bits=8"), "protocol.name = dense: sends float32"),
        (("protocol.name=ring",), "protocol.name = ring: needs quantizer.bits = 8"),
        (("protocol.name=server", "protocol.rank=2"), "protocol.rank = 2: must be below"),
        (("protocol.name=hybrid", "protocol.inside=3"), "protocol.inside = 3: must divide the nu"),
        (("protocol.name=chunky",), "unknown: did you mean chunked?"),
    ],
)
def test_incompatible_settings_are_rejected(
    tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    result = run([*DAT, "train", "digits", *words, "--workers", "2"], tmp_path)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert message in line
