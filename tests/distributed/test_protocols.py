"""The protocols between real workers: right, equal everywhere, and counted to the byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dat.comm import Buckets
from dat.comm.message import share_out, spans
from tests.distributed import exchanges_in_workers
from tests.distributed.conftest import DAT, SMALL, distance, run, train, weights
from tests.distributed.exchanges_in_workers import LENGTH, STEPS, buckets, cases
from tests.distributed.forked import run_workers

Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Seen]:
    """What each of M workers saw."""

    @cache
    def seen(workers: int) -> Seen:
        folder = tmp_path_factory.mktemp(f"seen{workers}")
        run_workers(workers, exchanges_in_workers.main, folder)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(workers)]

    return seen


WORKERS = (1, 2, 3, 5)
NAMES = tuple(cases(1))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", NAMES)
def test_the_sum_is_the_simulated_one(
    watch: Callable[[int], Seen], workers: int, name: str
) -> None:
    """However the gradient was cut and whoever added up; a ring of floats adds in its own order."""
    found = watch(workers)[0]["every_protocol"][name]
    exact = not name.startswith(("dense", "ring"))
    assert found["error"] <= (0 if exact else 1e-6 * found["scale"])


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", NAMES)
def test_replicas_are_equal_to_the_last_bit(
    watch: Callable[[int], Seen], workers: int, name: str
) -> None:
    assert len({worker["every_protocol"][name]["digest"] for worker in watch(workers)}) == 1


@pytest.mark.parametrize("workers", WORKERS)
def test_who_the_server_is_does_not_matter(watch: Callable[[int], Seen], workers: int) -> None:
    found = watch(workers)[0]["every_protocol"]
    assert len({found[name]["digest"] for name in ("server first", "server last", "chunked")}) == 1
    assert found["server feedback"]["digest"] == found["chunked feedback"]["digest"]
    assert found["chunked"]["digest"] != found["chunked feedback"]["digest"]
    assert found["hybrid"]["digest"] == found["chunked"]["digest"]  # every worker its own node


@pytest.mark.parametrize("workers", WORKERS)
def test_bytes_to_the_byte(watch: Callable[[int], Seen], workers: int) -> None:
    seen = [worker["every_protocol"] for worker in watch(workers)]
    others = workers - 1

    def sent(name: str) -> list[int]:
        return [worker[name]["sent"] for worker in seen]

    for name in NAMES:
        whole = STEPS * sum(seen[0][name]["sizes"])
        quantizer, _ = cases(workers)[name]
        if name.startswith("gather") and not quantizer.whole:
            assert sent(name) == [others * whole] * workers
        if name.startswith("server"):
            server = 0 if name == "server first" else workers - 1
            assert sent(name) == [others * whole if r == server else whole for r in range(workers)]
        if name in ("hybrid", "chunked", "chunked 32", "chunked feedback"):
            shares = [
                share_out(spans(bucket, quantizer), quantizer, workers) for bucket in buckets()
            ]
            largest = sum(max(share.size for share in bucket) for bucket in shares)
            assert sent(name) == [2 * others * STEPS * largest] * workers
        if name.startswith("ring"):
            assert sum(sent(name)) == pytest.approx(2 * others * whole, abs=12 * workers * STEPS)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", NAMES)
def test_broken_values_are_the_ones_to_blame(
    watch: Callable[[int], Seen], workers: int, name: str
) -> None:
    """So that the parameter can be named: neighbours in the same group stay finite."""
    for worker in watch(workers):
        assert worker["a_broken_gradient"][name] == [3, 1700]


@pytest.mark.parametrize("workers", WORKERS)
def test_other_precisions_and_many_buckets(watch: Callable[[int], Seen], workers: int) -> None:
    seen = watch(workers)
    for worker in seen:
        assert worker["double_precision"] == {"kind": "torch.float64", "same": True}
        assert worker["many_buckets"] == seen[0]["many_buckets"]
        assert len(set(worker["many_buckets"])) == 4  # every step rounds anew
        assert worker["automatic"] == seen[0]["automatic"]
        for said in worker["a_failure_in_a_lane"]:
            assert "no room" in said
        assert len(worker["a_failure_in_a_lane"]) == 2
        assert worker["threads_are_given_back"] == 0
        assert worker["defaults"] == [["dense", 32], ["chunked", 4], ["gather", 8], ["gather", 8]]
    if workers == 1:
        assert seen[0]["automatic"] == ["Dense", 32]


@pytest.fixture(scope="module")
def on_nodes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Seen]:
    """What each of M workers saw of `hybrid`."""

    @cache
    def seen(workers: int) -> Seen:
        folder = tmp_path_factory.mktemp(f"nodes{workers}")
        run_workers(workers, exchanges_in_workers.nodes, folder)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(workers)]

    return seen


LAYOUTS = [(4, 1), (4, 2), (4, 4), (6, 1), (6, 2), (6, 3), (6, 6)]
"""Workers, and workers a node."""


@pytest.mark.parametrize(("workers", "inside"), LAYOUTS)
def test_nodes_add_up_in_floats_and_exchange_in_bits(
    on_nodes: Callable[[int], Seen], workers: int, inside: int
) -> None:
    """The simulated sum to the bit, near the exact one, and the same at every worker."""
    seen = [worker["layouts"] for worker in on_nodes(workers)]
    for way, off in (("32", 1e-6), ("4", 0.3), ("feedback", torch.inf), ("tensor", 0.5)):
        name = f"{inside} {way}"
        if way != "tensor":  # its groups are cut with the shares, and so is its noise
            assert seen[0][name]["error"] == 0
        assert seen[0][name]["off"] < off
        assert len({worker[name]["digest"] for worker in seen}) == 1


@pytest.mark.parametrize(("workers", "inside"), LAYOUTS)
def test_bytes_inside_and_between_nodes(
    on_nodes: Callable[[int], Seen], workers: int, inside: int
) -> None:
    """Between: each of M shares to p - 1 nodes and back. Inside: every worker gives its neighbours
    their stretches and its own, 2 p (q - 1) 4 d in all."""
    nodes, quantizers = workers // inside, {"32": Buckets(), "4": Buckets(bits=4)}
    for way, quantizer in quantizers.items():
        seen = [worker["layouts"][f"{inside} {way}"] for worker in on_nodes(workers)]
        shares = [share_out(spans(it, quantizer), quantizer, workers) for it in buckets()]
        largest = sum(max(share.size for share in bucket) for bucket in shares)
        assert {it["between"] for it in seen} == {2 * (nodes - 1) * STEPS * largest}
        within = sum(it["sent"] - it["between"] for it in seen)
        assert within == 2 * nodes * (inside - 1) * 4 * LENGTH * STEPS


@pytest.mark.parametrize("workers", [4, 6])
def test_nodes_with_hardly_anything_to_exchange(
    on_nodes: Callable[[int], Seen], workers: int
) -> None:
    total = sum(range(workers))
    for worker in on_nodes(workers):
        for values in worker["tiny_buckets"]:
            assert values == pytest.approx([total] * len(values), rel=0.02)


@pytest.mark.parametrize("workers", [4, 6])
def test_what_nodes_exchange_is_right_on_average(
    on_nodes: Callable[[int], Seen], workers: int
) -> None:
    """256 squared standard errors have mean 1 and standard deviation sqrt(2 / 256)."""
    assert on_nodes(workers)[0]["right_on_average"] < 1 + 5 * (2 / 256) ** 0.5


@pytest.mark.parametrize("workers", [4, 6])
def test_a_part_of_the_workers_swaps_in_one_batch(
    on_nodes: Callable[[int], Seen], workers: int
) -> None:
    assert all(worker["one_batch"] for worker in on_nodes(workers))


@pytest.mark.parametrize("workers", [4, 6])
def test_nodes_are_taken_as_the_launcher_made_them(
    on_nodes: Callable[[int], Seen], workers: int
) -> None:
    for worker in on_nodes(workers):
        inside, said = worker["as_launched"]
        assert inside == workers // 2
        assert f"as many workers as each other, not 1, {workers - 1}; start as many" in said


def test_training_is_repeatable_and_the_same_for_both_two_sided_protocols(tmp_path: Path) -> None:
    words = (*SMALL, "quantizer.bits=4", "--workers", "3")
    chunked = weights(train(DAT, tmp_path, *words))
    server = weights(train(DAT, tmp_path, *words, "protocol.name=server", "protocol.rank=2"))
    gather = weights(train(DAT, tmp_path, *words, "protocol.name=gather"))
    hybrid = weights(train(DAT, tmp_path, *words, "protocol.name=hybrid", "protocol.inside=1"))
    assert distance(chunked, server) == 0
    assert distance(chunked, hybrid) == 0
    assert distance(chunked, gather) > 0


def test_a_nan_gradient_is_named_by_its_parameter(tmp_path: Path) -> None:
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
    done = run([*DAT, "train", "digits", *words, "--workers", "2", "--out", "out"], tmp_path)
    assert done.returncode == 3, done.stderr
    assert "the gradient of net.first.weight is not finite" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("quantizer.bits=9",), "quantizer.bits = 9: must be one of 2, 3, 4, 5, 6, 7, 8, 16, 32"),
        (("protocol.name=dense", "quantizer.bits=8"), "protocol.name = dense: sends floats"),
        (("protocol.name=ring",), "protocol.name = ring: adds integers of 8 bits"),
        (("protocol.name=server", "protocol.rank=2"), "protocol.rank = 2: must be below"),
        (("protocol.name=hybrid", "protocol.inside=3"), "protocol.inside = 3: must divide the nu"),
        (("protocol.name=chunky",), "unknown: did you mean chunked?"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    done = run([*DAT, "train", "digits", *words, "--workers", "2"], tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert message in line
