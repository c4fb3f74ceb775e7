"""Every protocol in real workers: what came out, beside a simulation of it in one process."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dat.comm import (
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
    reference,
    transport,
)
from dat.comm.message import Message, Slot, compose, spans
from dat.rng import derive

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
    found, position = [], 0
    for shape in SHAPES:
        found.append(Slot(shape, position))
        position += found[-1].length
    return found


LENGTH = sum(slot.length for slot in slots())


def gradient(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(LENGTH, generator=generator) * 10.0 ** -(rank % 3)


def buckets() -> list[list[Slot]]:
    """In another order than that of the gradient, as DDP's are."""
    last = slots()[::-1]
    return [last[:2], last[2:5], last[5:]]


def exchange(reducer: Reducer, step: int) -> Tensor:
    """Hand over all buckets, then wait; put together in the gradient's order."""
    mine = gradient(reducer.world.rank, step)
    reducer.begin(0, step)
    flats, futures = [], []
    whole = [slots()] if reducer.quantizer.whole else buckets()
    for number, bucket in enumerate(whole):
        pieces = [mine[slot.position : slot.position + slot.length] for slot in bucket]
        flats.append(torch.cat(pieces))
        futures.append(reducer.sum(number, flats[-1], bucket))
    out = torch.full((LENGTH,), torch.nan)
    for bucket, future in zip(whole, futures, strict=True):
        start, total = 0, future.wait()
        for slot in bucket:
            out[slot.position : slot.position + slot.length] = total[start : start + slot.length]
            start += slot.length
    return out


class Simulation:
    """The same arithmetic by one process: whole messages, in torch, in the order of the workers."""

    def __init__(self, quantizer: Quantizer, protocol: Protocol, workers: int) -> None:
        self.quantizer, self.protocol, self.workers = quantizer, protocol, workers
        self.layout: Message = compose(spans(slots(), quantizer), quantizer.bits)
        self.levels = quantizer.levels // (workers if isinstance(protocol, Ring) else 1)
        self.inside = (protocol.inside or 1) if isinstance(protocol, Hybrid) else 1
        self.left = [torch.zeros(LENGTH) for _ in range(workers + 1)]

    def sum(self, step: int) -> Tensor:
        nodes = range(self.workers // self.inside)
        gradients = [self.within(node, step) + self.left[node] for node in nodes]
        steps = self.common_steps(gradients) if isinstance(self.protocol, Ring) else None
        total = torch.zeros(LENGTH)
        for rank, mine in enumerate(gradients):
            key = derive(SEED, "quantize", 0, step, rank)
            total = total + self.rounded(mine, key, rank, steps)
        if isinstance(self.protocol, Server | Chunked | Hybrid):
            key = derive(SEED, "quantize again", 0, step)
            total = self.rounded(total + self.left[-1], key, self.workers)
        return total

    def within(self, node: int, step: int) -> Tensor:
        """What a node has: its workers' floats, added up in their order."""
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
        found = []
        for mine in gradients:
            message = torch.zeros(self.layout.size, dtype=torch.uint8)
            reference.measure(mine, self.layout, self.levels, self.quantizer.scale, message)
            found.append(message[: 4 * self.layout.steps].clone().view(torch.float32))
        return torch.stack(found).amax(0)


def every_protocol(world: World) -> Any:
    seen = {}
    for name, (quantizer, protocol) in cases(world.size).items():
        ledger = Ledger(world.device)
        reducer = Reducer(quantizer, protocol, world, length=LENGTH, ledger=ledger, seed=SEED)
        simulation = Simulation(quantizer, protocol, world.size)
        results = [exchange(reducer, step) for step in range(STEPS)]
        expected = [simulation.sum(step) for step in range(STEPS)]
        reducer.close()
        traffic = ledger.close()
        seen[name] = {
            "digest": digest(torch.cat(results)),
            "error": max(
                float((a - b).abs().max()) for a, b in zip(results, expected, strict=True)
            ),
            "scale": float(expected[0].abs().max()),
            "sent": traffic.sent,
            "busy": traffic.busy,
            "sizes": [compose(spans(b, quantizer), quantizer.bits).size for b in buckets()],
        }
    return seen


def layouts(world: World) -> Any:
    """`hybrid` with every number of workers a node, in floats, few bits, and error feedback."""
    seen = {}
    ways = {
        "32": Buckets(),
        "4": Buckets(bits=4),
        "feedback": Buckets(bits=2, error_feedback=True),
        "tensor": PerTensor(bits=8),
    }
    for inside in (q for q in range(1, world.size + 1) if world.size % q == 0):
        for name, quantizer in ways.items():
            ledger, protocol = Ledger(world.device), Hybrid(inside=inside)
            reducer = Reducer(quantizer, protocol, world, length=LENGTH, ledger=ledger, seed=SEED)
            results = [exchange(reducer, step) for step in range(STEPS)]
            reducer.close()
            traffic = ledger.close()
            simulation = Simulation(quantizer, protocol, world.size)
            expected = [simulation.sum(step) for step in range(STEPS)]
            exact = torch.stack([gradient(rank, 1).double() for rank in range(world.size)]).sum(0)
            seen[f"{inside} {name}"] = {
                "digest": digest(torch.cat(results)),
                "error": float((torch.stack(results) - torch.stack(expected)).abs().max()),
                "off": float((results[1] - exact).norm() / exact.norm()),
                "sent": traffic.sent,
                "between": traffic.between,
            }
    return seen


def tiny_buckets(world: World) -> Any:
    """Fewer values than workers: some have nothing to add up, and nobody waits for them."""
    seen = []
    for length in (1, 2, 5):
        reducer = Reducer(
            Buckets(bits=8), Hybrid(inside=2), world, length=length, ledger=Ledger(world.device)
        )
        mine = torch.full((length,), float(world.rank))
        seen.append(reducer.sum(0, mine, [Slot((1, length), 0)]).wait().tolist())
        reducer.close()
    return seen


def right_on_average(world: World) -> Any:
    """Two bits, many times over: the mean's distance from the sum, in standard errors, squared."""
    quantizer, times = Buckets(bits=2, size=64, dense_vectors=False), 300
    reducer = Reducer(
        quantizer, Hybrid(inside=2), world, length=LENGTH, ledger=Ledger(world.device)
    )
    found = []
    for step in range(times):
        reducer.begin(0, step)
        found.append(reducer.sum(0, gradient(world.rank, 0)[:256], [Slot((256,), 0)]).wait())
    reducer.close()
    draws = torch.stack(found).double()
    exact = torch.stack([gradient(r, 0)[:256].double() for r in range(world.size)]).sum(0)
    error = draws.std(0).clamp(min=1e-12) / times**0.5
    return float(((draws.mean(0) - exact) / error).square().mean())


def one_batch(world: World) -> Any:
    """What is used on CUDA, among the even and the odd workers, with rows of different lengths."""
    circle = range(world.rank % 2, world.size, 2)
    me = circle.index(world.rank)
    group = dist.group.WORLD
    assert group is not None
    out = [torch.full((i,), float(10 * world.rank + i)) for i in range(len(circle))]
    into = [torch.zeros(me) for _ in circle]
    transport._batch(out, into, group, circle, me)
    return [row.tolist() for row in into] == [[10.0 * other + me] * me for other in circle]


def as_launched(world: World) -> Any:
    """Nodes as a launcher tells of them: even ones are taken, others are refused by all alike."""

    def on(sizes: list[int]) -> World:
        places = [(rank, size) for size in sizes for rank in range(size)]
        rank, size = places[world.rank]
        return replace(world, local_rank=rank, local_size=size)

    half = world.size // 2
    reducer = Reducer(
        Buckets(bits=8), Hybrid(), on([half, half]), length=9, ledger=Ledger(world.device)
    )
    found = reducer.protocol
    reducer.close()
    try:
        on([1, world.size - 1]).workers_a_node()
        said = ""
    except WorkerError as error:
        said = str(error)
    return [getattr(found, "inside", None), said]


def a_broken_gradient(world: World) -> Any:
    """NaN at one worker, infinity at another: everybody sees which values are broken."""
    seen = {}
    for name, (quantizer, protocol) in cases(world.size).items():
        reducer = Reducer(quantizer, protocol, world, length=LENGTH, ledger=Ledger(world.device))
        mine = gradient(world.rank, 0)
        if world.rank == world.size - 1:
            mine[3], mine[1700] = torch.inf, torch.nan
        total = reducer.sum(0, mine, slots()).wait()
        seen[name] = (~total.isfinite()).nonzero().flatten().tolist()
        reducer.close()
    return seen


def double_precision(world: World) -> Any:
    """A bucket of float64 is exchanged as float32 and stays float64."""
    reducer = Reducer(Buckets(bits=8), Chunked(), world, length=LENGTH, ledger=Ledger(world.device))
    mine = gradient(world.rank, 0)
    single = reducer.sum(0, mine.clone(), slots()).wait()
    double = reducer.sum(0, mine.double(), slots()).wait()
    reducer.close()
    return {"kind": str(double.dtype), "same": torch.equal(single.double(), double)}


def many_buckets(world: World) -> Any:
    """Through DDP, with many buckets under way at once: nobody waits for ever."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
    hooked = Exchange(net, world, quantizer=Buckets(bits=4), seed=1)
    digests = []
    for _ in range(4):
        net.zero_grad()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(world.rank))
        hooked(x).square().sum().backward()
        digests.append(
            digest(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
        )
    hooked.close()
    return digests


def a_failure_in_a_lane(world: World) -> Any:
    """It reaches the caller as it is, and nothing is exchanged any more."""
    reducer = Reducer(Buckets(bits=8), Chunked(), world, length=LENGTH, ledger=Ledger(world.device))
    bad, good = gradient(0, 0), gradient(0, 1)
    route = reducer._route(0, slots())

    def fail(*details: object) -> int:
        raise MemoryError("no room")

    route.collect = fail  # type: ignore[method-assign, assignment]
    futures = [reducer.sum(0, bad, slots()), reducer.sum(1, good, slots())]
    said = []
    for future in futures:
        try:
            future.wait()
        except Exception as error:
            said.append(str(error))
    reducer.close()
    return said


def threads_are_given_back(world: World) -> Any:
    before = threading.active_count()
    for _ in range(3):
        Reducer(Buckets(bits=8), Chunked(), world, length=1, ledger=Ledger(world.device)).close()
    choose(Buckets(bits=8), Auto(), world, 100)
    return threading.active_count() - before


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
    """What is only asked of workers on several nodes."""
    with World.join(threads=1) as world:
        checks = (layouts, tiny_buckets, right_on_average, one_batch, as_launched)
        seen = {check.__name__: check(world) for check in checks}
        (folder / f"{world.rank}.json").write_text(json.dumps(seen))


def main(folder: Path) -> None:
    checks = (
        every_protocol,
        a_broken_gradient,
        double_precision,
        many_buckets,
        a_failure_in_a_lane,
        threads_are_given_back,
        defaults,
        automatic,
    )
    with World.join(threads=1) as world:
        seen = {check.__name__: check(world) for check in checks}
        (folder / f"{world.rank}.json").write_text(json.dumps(seen))
