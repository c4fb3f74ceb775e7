"""Every protocol in real workers, compared with its simulation in one process."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dat.core.rng import derive
from dat.distributed import (
    Auto,
    Buckets,
    Chunked,
    Default,
    Dense,
    Exchange,
    Gather,
    Hybrid,
    Ledger,
    PerTensor,
    Protocol,
    Quantizer,
    Reducer,
    Ring,
    Server,
    WholeVector,
    WorkerError,
    World,
    choose,
    protocol_name,
    transport,
)
from dat.distributed.wire_format import Slot, message_layout, spans
from dat.kernels.quantize import reference
from dat.kernels.quantize.layout import MessageLayout

SHAPES = [(40, 30), (7,), (513,), (3, 5, 7), (1, 1), (2, 1999)]
STEPS = 2
SEED = 5


def cases(workers: int) -> dict[str, tuple[Quantizer, Protocol]]:
    last = workers - 1
    return {
        "dense": (Buckets(), Dense()),
        "gather 32": (Buckets(), Gather()),
        "chunked 32": (Buckets(), Chunked()),
        "gather 3": (Buckets(bits=3), Gather()),
        "gather vector": (WholeVector(bits=8), Gather()),
        "gather tensor": (PerTensor(bits=8), Gather()),
        "gather feedback": (Buckets(bits=2, error_feedback=True, rounding="nearest"), Gather()),
        "server first": (Buckets(bits=4), Server()),
        "server last": (Buckets(bits=4), Server(rank=last)),
        "chunked": (Buckets(bits=4), Chunked()),
        "server feedback": (Buckets(bits=4, error_feedback=True), Server(rank=last)),
        "chunked feedback": (Buckets(bits=4, error_feedback=True), Chunked()),
        "hybrid": (Buckets(bits=4), Hybrid(inside=1)),
        "hybrid one node": (Buckets(bits=4, error_feedback=True), Hybrid(inside=workers)),
        "ring": (Buckets(bits=8), Ring()),
        "ring feedback": (Buckets(bits=8, error_feedback=True), Ring()),
    }


def slots() -> list[Slot]:
    result, position = [], 0
    for shape in SHAPES:
        result.append(Slot(shape, position))
        position += result[-1].length
    return result


LENGTH = sum(slot.length for slot in slots())


def gradient(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(LENGTH, generator=generator) * 10.0 ** -(rank % 3)


def buckets() -> list[list[Slot]]:
    """In another order than in the gradient, as in DDP."""
    backward = slots()[::-1]
    return [backward[:2], backward[2:5], backward[5:]]


def exchange(reducer: Reducer, step: int) -> Tensor:
    """Sum all buckets concurrently; return the whole gradient in its own order."""
    own = gradient(reducer.world.rank, step)
    reducer.begin(0, step)
    flats, futures = [], []
    step_buckets = [slots()] if reducer.quantizer.whole else buckets()
    for index, bucket in enumerate(step_buckets):
        pieces = [own[slot.position : slot.position + slot.length] for slot in bucket]
        flats.append(torch.cat(pieces))
        futures.append(reducer.sum(index, flats[-1], bucket))
    out = torch.full((LENGTH,), torch.nan)
    for bucket, future in zip(step_buckets, futures, strict=True):
        start, total = 0, future.wait()
        for slot in bucket:
            out[slot.position : slot.position + slot.length] = total[start : start + slot.length]
            start += slot.length
    return out


class Simulation:
    """The same arithmetic in one process: undivided messages, in torch, in rank order."""

    def __init__(self, quantizer: Quantizer, protocol: Protocol, workers: int) -> None:
        self.quantizer, self.protocol, self.workers = quantizer, protocol, workers
        self.layout: MessageLayout = message_layout(spans(slots(), quantizer), quantizer.bits)
        self.levels = quantizer.levels // (workers if isinstance(protocol, Ring) else 1)
        self.inside = (protocol.inside or 1) if isinstance(protocol, Hybrid) else 1
        self.left = [torch.zeros(LENGTH) for _ in range(workers + 1)]

    def sum(self, step: int) -> Tensor:
        nodes = range(self.workers // self.inside)
        gradients = [self.node_sum(node, step) + self.left[node] for node in nodes]
        steps = self.common_steps(gradients) if isinstance(self.protocol, Ring) else None
        total = torch.zeros(LENGTH)
        for rank, own in enumerate(gradients):
            key = derive(SEED, "quantize", 0, step, rank)
            total = total + self.rounded(own, key, rank, steps)
        if isinstance(self.protocol, Server | Chunked | Hybrid):
            key = derive(SEED, "quantize again", 0, step)
            total = self.rounded(total + self.left[-1], key, self.workers)
        return total

    def node_sum(self, node: int, step: int) -> Tensor:
        """The sum over the workers of a node, in float32 and in rank order."""
        first, *others = range(node * self.inside, (node + 1) * self.inside)
        total = gradient(first, step)
        for rank in others:
            total = total + gradient(rank, step)
        return total

    def rounded(self, x: Tensor, key: int, memory: int, steps: Tensor | None = None) -> Tensor:
        message = torch.zeros(self.layout.size, dtype=torch.uint8)
        if steps is not None:
            reference.measure(x, self.layout, self.levels, self.quantizer.scale, message)
            message[: steps.nbytes] = steps.view(torch.uint8)
        reference.encode(
            x,
            self.layout,
            bits=self.quantizer.bits,
            levels=self.levels,
            norm=self.quantizer.scale if steps is None else "given",
            random=self.quantizer.rounding == "random",
            key=key,
            message=message,
        )
        out = torch.zeros(LENGTH)
        reference.decode(message, self.layout, bits=self.quantizer.bits, mode="set", out=out)
        if self.quantizer.error_feedback:
            self.left[memory] = x - out
        return out

    def common_steps(self, gradients: list[Tensor]) -> Tensor:
        steps = []
        for own in gradients:
            message = torch.zeros(self.layout.size, dtype=torch.uint8)
            reference.measure(own, self.layout, self.levels, self.quantizer.scale, message)
            steps.append(message[: 4 * self.layout.steps].clone().view(torch.float32))
        return torch.stack(steps).amax(0)


def every_protocol(world: World) -> Any:
    results_by_name = {}
    for name, (quantizer, protocol) in cases(world.size).items():
        ledger = Ledger(world.device)
        reducer = Reducer(quantizer, protocol, world, length=LENGTH, ledger=ledger, seed=SEED)
        simulation = Simulation(quantizer, protocol, world.size)
        results = [exchange(reducer, step) for step in range(STEPS)]
        expected = [simulation.sum(step) for step in range(STEPS)]
        reducer.close()
        traffic = ledger.read_and_reset()
        results_by_name[name] = {
            "digest": digest(torch.cat(results)),
            "error": max(
                float((a - b).abs().max()) for a, b in zip(results, expected, strict=True)
            ),
            "scale": float(expected[0].abs().max()),
            "sent": traffic.sent,
            "busy": traffic.busy,
            "sizes": [message_layout(spans(b, quantizer), quantizer.bits).size for b in buckets()],
        }
    return results_by_name


def layouts(world: World) -> Any:
    """`hybrid` with every number of workers per node: dense, quantized, and with error feedback."""
    results_by_name = {}
    quantizers = {
        "32": Buckets(),
        "4": Buckets(bits=4),
        "feedback": Buckets(bits=2, error_feedback=True),
        "tensor": PerTensor(bits=8),
    }
    for inside in (q for q in range(1, world.size + 1) if world.size % q == 0):
        for name, quantizer in quantizers.items():
            ledger, protocol = Ledger(world.device), Hybrid(inside=inside)
            reducer = Reducer(quantizer, protocol, world, length=LENGTH, ledger=ledger, seed=SEED)
            results = [exchange(reducer, step) for step in range(STEPS)]
            reducer.close()
            traffic = ledger.read_and_reset()
            simulation = Simulation(quantizer, protocol, world.size)
            expected = [simulation.sum(step) for step in range(STEPS)]
            exact = torch.stack([gradient(rank, 1).double() for rank in range(world.size)]).sum(0)
            results_by_name[f"{inside} {name}"] = {
                "digest": digest(torch.cat(results)),
                "error": float((torch.stack(results) - torch.stack(expected)).abs().max()),
                "relative": float((results[1] - exact).norm() / exact.norm()),
                "sent": traffic.sent,
                "between": traffic.inter_node,
            }
    return results_by_name


def tiny_buckets(world: World) -> Any:
    """Fewer values than workers: workers without values do not block the others."""
    sums = []
    for length in (1, 2, 5):
        reducer = Reducer(
            Buckets(bits=8), Hybrid(inside=2), world, length=length, ledger=Ledger(world.device)
        )
        own = torch.full((length,), float(world.rank))
        sums.append(reducer.sum(0, own, [Slot((1, length), 0)]).wait().tolist())
        reducer.close()
    return sums


def bias(world: World) -> Any:
    """Two bits, many times: the mean squared deviation from the exact sum, in standard errors."""
    quantizer, times = Buckets(bits=2, size=64, dense_vectors=False), 300
    reducer = Reducer(
        quantizer, Hybrid(inside=2), world, length=LENGTH, ledger=Ledger(world.device)
    )
    sums = []
    for step in range(times):
        reducer.begin(0, step)
        sums.append(reducer.sum(0, gradient(world.rank, 0)[:256], [Slot((256,), 0)]).wait())
    reducer.close()
    draws = torch.stack(sums).double()
    exact = torch.stack([gradient(r, 0)[:256].double() for r in range(world.size)]).sum(0)
    error = draws.std(0).clamp(min=1e-12) / times**0.5
    return float(((draws.mean(0) - exact) / error).square().mean())


def one_batch(world: World) -> Any:
    """The code path of CUDA, in two subgroups (even and odd ranks); rows differ in length."""
    ranks = range(world.rank % 2, world.size, 2)
    own = ranks.index(world.rank)
    group = dist.group.WORLD
    assert group is not None
    out = [torch.full((i,), float(10 * world.rank + i)) for i in range(len(ranks))]
    into = [torch.zeros(own) for _ in ranks]
    transport._batch(out, into, group, ranks, own)
    return [row.tolist() for row in into] == [[10.0 * other + own] * own for other in ranks]


def launched_nodes(world: World) -> Any:
    """The launcher's nodes: equal sizes are used, others raise the same error on every worker."""

    def on(sizes: list[int]) -> World:
        places = [(rank, size) for size in sizes for rank in range(size)]
        rank, size = places[world.rank]
        return replace(world, local_rank=rank, local_size=size)

    half = world.size // 2
    reducer = Reducer(
        Buckets(bits=8), Hybrid(), on([half, half]), length=9, ledger=Ledger(world.device)
    )
    protocol = reducer.protocol
    reducer.close()
    try:
        on([1, world.size - 1]).workers_per_node()
        message = ""
    except WorkerError as error:
        message = str(error)
    return [getattr(protocol, "inside", None), message]


def non_finite_values(world: World) -> Any:
    """With NaN and infinity on one worker: the positions that are not finite in the sum."""
    positions = {}
    for name, (quantizer, protocol) in cases(world.size).items():
        reducer = Reducer(quantizer, protocol, world, length=LENGTH, ledger=Ledger(world.device))
        own = gradient(world.rank, 0)
        if world.rank == world.size - 1:
            own[3], own[1700] = torch.inf, torch.nan
        total = reducer.sum(0, own, slots()).wait()
        positions[name] = (~total.isfinite()).nonzero().flatten().tolist()
        reducer.close()
    return positions


def double_precision(world: World) -> Any:
    """A float64 bucket is exchanged as float32 and stays float64."""
    reducer = Reducer(Buckets(bits=8), Chunked(), world, length=LENGTH, ledger=Ledger(world.device))
    own = gradient(world.rank, 0)
    single = reducer.sum(0, own.clone(), slots()).wait()
    double = reducer.sum(0, own.double(), slots()).wait()
    reducer.close()
    return {"dtype": str(double.dtype), "same": torch.equal(single.double(), double)}


def many_buckets(world: World) -> Any:
    """Through DDP, with many buckets in flight at once: no deadlock."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
    bucketed = Exchange(net, world, quantizer=Buckets(bits=4), seed=1)
    digests = []
    for _ in range(4):
        net.zero_grad()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(world.rank))
        bucketed(x).square().sum().backward()
        digests.append(
            digest(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
        )
    bucketed.close()
    return digests


def failing_stage(world: World) -> Any:
    """Its error reaches the caller unchanged, and later buckets fail too."""
    reducer = Reducer(Buckets(bits=8), Chunked(), world, length=LENGTH, ledger=Ledger(world.device))
    bad, good = gradient(0, 0), gradient(0, 1)
    route = reducer._route(0, slots())

    def fail(*details: object) -> int:
        raise MemoryError("no room")

    route.collect = fail  # type: ignore[method-assign, assignment]
    futures = [reducer.sum(0, bad, slots()), reducer.sum(1, good, slots())]
    messages = []
    for future in futures:
        try:
            future.wait()
        except Exception as error:
            messages.append(str(error))
    reducer.close()
    return messages


def leaked_threads(world: World) -> Any:
    before = threading.active_count()
    for _ in range(3):
        Reducer(Buckets(bits=8), Chunked(), world, length=1, ledger=Ledger(world.device)).close()
    choose(Buckets(bits=8), Auto(), world, 100)
    return threading.active_count() - before


def group_creation(world: World) -> Any:
    """The times when this worker had created its groups, which takes worker 0 long, and when its
    reducer was ready: a worker that destroyed a group before the others have created it would break
    their connections."""
    created, new_group = [], dist.new_group

    def slow_new_group(*args: Any, **options: Any) -> Any:
        group = new_group(*args, **options)
        time.sleep(0.1 * world.first)
        created.append(time.monotonic())
        return group

    dist.new_group = slow_new_group
    try:
        ledger = Ledger(world.device)
        reducer = Reducer(Buckets(bits=8), Chunked(), world, length=1, ledger=ledger)
    finally:
        dist.new_group = new_group
    ready = time.monotonic()
    reducer.close()
    return [created[-1], ready]


def defaults(world: World) -> Any:
    quantizers = (Buckets(), Buckets(bits=4), PerTensor(bits=8), WholeVector(bits=8))
    chosen = [choose(quantizer, Default(), world, 10) for quantizer in quantizers]
    return [[protocol_name(protocol), quantizer.bits] for quantizer, protocol in chosen]


def automatic(world: World) -> Any:
    quantizer, protocol = choose(Buckets(bits=8), Auto(), world, 10_000)
    return type(protocol).__name__, quantizer.bits


def digest(x: Tensor) -> str:
    return hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()


def nodes(folder: Path) -> None:
    """The checks for workers on several nodes."""
    with World.join(threads=1) as world:
        checks = (layouts, tiny_buckets, bias, one_batch, launched_nodes)
        results = {check.__name__: check(world) for check in checks}
        (folder / f"{world.rank}.json").write_text(json.dumps(results))


def main(folder: Path) -> None:
    checks = (
        every_protocol,
        non_finite_values,
        double_precision,
        many_buckets,
        failing_stage,
        leaked_threads,
        group_creation,
        defaults,
        automatic,
    )
    with World.join(threads=1) as world:
        results = {check.__name__: check(world) for check in checks}
        (folder / f"{world.rank}.json").write_text(json.dumps(results))
