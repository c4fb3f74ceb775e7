"""The model of a step: closed forms where there are some, order where there is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dat.distributed import CONCRETE_PROTOCOLS, Buckets, WholeVector
from dat.tools.planning import Cluster, ComputeTimes, Costs, NetworkLink, Prediction, predict
from dat.tools.planning.gradient import even
from tests.tools.planning.cases import FAST, FREE, NOTHING, cluster

ONE = even(1 << 18)
"""One bucket."""
HOPS = {"dense": 6, "gather": 1, "server": 2, "chunked": 2, "ring": 18}
"""Messages that wait for each other, of 4 workers; a ring passes three sums around."""


def foresee(protocol: str, there: Cluster, bits: int = 32, costs: Costs = FREE) -> Prediction:
    return predict(
        ONE, NOTHING, protocol=protocol, quantizer=Buckets(bits=bits), cluster=there, costs=costs
    )


@pytest.mark.parametrize("protocol", HOPS)
def test_an_infinite_link_leaves_the_latency(protocol: str) -> None:
    bits = 8 if protocol == "ring" else 32
    found = foresee(protocol, cluster(4, latency=0.25), bits)
    assert found.step == pytest.approx(0.25 * HOPS[protocol])
    assert found.step == found.exposed == found.communication


@pytest.mark.parametrize("protocol", HOPS)
def test_without_latency_it_is_bytes_over_the_rate(protocol: str) -> None:
    """The busiest worker's; a server gets as much as it sends, first the one, then the other."""
    bits = 8 if protocol == "ring" else 32
    found = foresee(protocol, cluster(4, rate=8e6), bits)
    turns = 2 if protocol == "server" else 1
    assert found.step == pytest.approx(turns * found.busiest / 1e6, rel=1e-6)


def test_the_devices_of_a_node_share_its_link() -> None:
    flat, inside = cluster(2, 8e6, devices=4), cluster(2, 8e6, devices=4)
    chunked, hybrid = foresee("chunked", flat), foresee("hybrid", inside)
    size = 4 * ONE.values
    assert chunked.step == pytest.approx(2 * 4 * 4 * size / 8 / 1e6)  # 4 send 1/8 to each of 4
    assert hybrid.step == pytest.approx(2 * size / 2 / 1e6)
    ring = foresee("dense", flat)
    assert ring.step == pytest.approx(2 * 7 / 8 * size / 1e6)  # one of the four sends to the other


def test_kernels_and_cores_count() -> None:
    kernels = {job: {32: 1e-6} for job in ("encode", "decode", "add", "measure")}
    costs = replace(FREE, kernels=kernels)
    alone = foresee("gather", cluster(3), costs=costs)
    values = ONE.values
    assert alone.step == pytest.approx(1e-6 * values * (1 + 3))  # encode one, add up three
    crowded = replace(cluster(3), cores=1.0, shared=True)
    assert foresee("gather", crowded, costs=costs).step == pytest.approx(3 * alone.step)
    server = foresee("server", crowded, costs=costs)
    assert server.step == pytest.approx(1e-6 * values * (3 + 3 + 1 + 3))  # only one adds up


def test_the_exchange_hides_behind_the_backward_pass() -> None:
    gradient = even(64 << 20, 64)  # 4 MiB, then 28 MiB nine times
    compute = ComputeTimes(images=1, forward=1.0, backward=100.0, after=2.0)

    def step(rate: float, whole: bool = False) -> Prediction:
        quantizer = WholeVector(bits=8) if whole else Buckets(bits=8)
        return predict(
            gradient,
            compute,
            protocol="chunked",
            quantizer=quantizer,
            cluster=cluster(2, rate),
            costs=FREE,
        )

    found = step(8e7)
    last = gradient.buckets()[-1].values
    assert found.alone == pytest.approx(103)
    assert found.exposed == pytest.approx(last * (1 + 4 / 512) / 1e7, rel=1e-6)
    assert found.communication == pytest.approx(found.busiest / 1e7, rel=1e-6)
    whole = step(8e7, whole=True)
    assert whole.exposed == pytest.approx(whole.communication)  # nothing to hide behind


def test_one_worker_exchanges_nothing() -> None:
    found = foresee("dense", cluster(1, rate=8.0, latency=1.0))
    assert (found.step, found.sent, found.exposed, found.binds) == (0, 0, 0, "nothing")


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(HOPS)),
    st.integers(2, 40),
    st.floats(1e6, 1e10),
    st.floats(1.0, 50.0),
    st.floats(0.0, 2.0),
)
def test_a_faster_link_is_never_slower(
    protocol: str, workers: int, rate: float, faster: float, backward: float
) -> None:
    gradient = even(20 << 20, 16)
    compute = ComputeTimes(images=1, backward=backward)

    def step(rate: float) -> float:
        return predict(
            gradient,
            compute,
            protocol=protocol,
            quantizer=Buckets(bits=8 if protocol in ("ring", "chunked") else 32),
            cluster=cluster(workers, rate, latency=1e-4),
            costs=replace(Costs(), byte=0.0, ring_byte=0.0),
        ).step

    assert step(rate * faster) <= step(rate) * (1 + 1e-6)


@settings(max_examples=40)
@given(
    st.sampled_from(("gather", "server", "chunked", "hybrid")),
    st.sampled_from((2, 3, 4, 5, 6, 7, 8, 16, 32)),
    st.sampled_from((2, 3, 4, 5, 6, 7, 8, 16, 32)),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(40_000, 100_000),  # so few values that a step weighs more than they do are left out
)
def test_more_bits_are_never_fewer_bytes(
    protocol: str, one: int, other: int, nodes: int, devices: int, values: int
) -> None:
    fewer, more = sorted((one, other))
    there = cluster(nodes, 1e9, devices=devices)

    def found(bits: int) -> Prediction:
        return predict(
            even(values),
            NOTHING,
            protocol=protocol,
            quantizer=Buckets(bits=bits),
            cluster=there,
            costs=FREE,
        )

    low, high = found(fewer), found(more)
    assert low.sent <= high.sent
    assert low.busiest <= high.busiest


@pytest.mark.parametrize("protocol", CONCRETE_PROTOCOLS)
def test_thousands_of_workers_can_be_planned(protocol: str) -> None:
    link = NetworkLink.named("10gbit")
    there = Cluster(nodes=512, devices=8, link=link, inside=FAST, cores=64)
    found = predict(
        even(4 << 20, 8),
        ComputeTimes(images=8, backward=0.1),
        protocol=protocol,
        quantizer=Buckets(bits=8 if protocol == "ring" else 4),
        cluster=there,
        costs=Costs(),
    )
    assert found.workers == 4096
    assert found.step > found.alone > 0
    assert found.sent >= found.busiest > 0
