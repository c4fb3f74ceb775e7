"""A worker's part in the exchanges of 36 and of 1,024 workers, of which it is the only one: torch's
`fake` process group sends nothing. Compared with the CPU: the shapes, and the bytes in the
ledger."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from dat.distributed import (
    CONCRETE_PROTOCOLS,
    QUANTIZERS,
    Ledger,
    Protocol,
    Quantizer,
    Reducer,
    ScopedBatchNorm,
    ShardedExchange,
    WorkerSubgroup,
    World,
)
from dat.distributed.wire_format import Slot
from tests.devices.device_code import RECORDER
from tests.devices.simulated import KIND

SIZES = {36: 6, 1024: 8}
"""The workers, and how many of them share a node; 36 are the paper's."""
RANKS = {36: (7,), 1024: (1023,)}
SHAPES = [(64, 129), (7,), (3, 5, 7)]


def slots() -> list[Slot]:
    made, position = [], 0
    for shape in SHAPES:
        made.append(Slot(shape, position))
        position += made[-1].length
    return made


LENGTH = sum(slot.length for slot in slots())


def exchanges(size: int) -> Iterator[tuple[str, Quantizer, Protocol]]:
    """Every protocol with every quantizer that it takes; among 1,024 workers in 8 bits only."""
    for name, quantizer in QUANTIZERS.items():
        for protocol_name, protocol in CONCRETE_PROTOCOLS.items():
            if protocol_name == "dense":
                continue  # the future of the fake all-reduce has no value
            if size > 36 and protocol_name == "gather":
                continue  # there, a message of each worker takes a second to decode on this device
            for bits in (8,) if size > 36 else (8, 32):
                made, inside = quantizer(bits=bits), {"inside": SIZES[size]}
                settled = replace(protocol(), **inside if protocol_name == "hybrid" else {})
                try:
                    settled.check(made, size)
                except ValueError:
                    continue
                yield f"{protocol_name} {name} {bits}", made, settled


def names() -> list[str]:
    return [f"{size} workers: {name}" for size in SIZES for name in names_of(size)]


def names_of(size: int) -> list[str]:
    return [*(name for name, *_ in exchanges(size)), "subgroup", "batch norm", "fsdp"]


def run(device: torch.device) -> Iterator[tuple[str, str]]:
    dist.Backend.backend_capability["fake"].append(KIND)
    for size in SIZES:
        problems = dict.fromkeys(names_of(size), "")
        for rank in RANKS[size]:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
            worlds = [world_of(of, rank, size) for of in (torch.device("cpu"), device)]
            for name, case in cases(size):
                try:
                    with _disable_current_modes():
                        expected = case(worlds[0])
                    with RECORDER.recording():
                        actual = case(worlds[1])
                    assert actual == expected, f"{actual} instead of {expected}"
                except Exception:
                    problems[name] += f"rank {rank}: {traceback.format_exc()}"
            dist.destroy_process_group()
        yield from ((f"{size} workers: {name}", text) for name, text in problems.items())


def world_of(device: torch.device, rank: int, size: int) -> World:
    on_node: dict[str, Any] = {"local_rank": rank % SIZES[size], "local_size": SIZES[size]}
    return World(rank, size, device, "fake", False, **on_node)


def cases(size: int) -> Iterator[tuple[str, Any]]:
    for name, quantizer, protocol in exchanges(size):
        yield name, partial(exchange, quantizer, protocol)
    yield "subgroup", partial(subgroup, SIZES[size])
    yield "batch norm", batch_norm
    yield "fsdp", fsdp


def exchange(quantizer: Quantizer, protocol: Protocol, world: World) -> Any:
    ledger = Ledger(world.device)
    reducer = Reducer(quantizer, protocol, world, length=LENGTH, ledger=ledger)
    reducer.begin(0, 0)
    total = reducer.sum(0, torch.ones(LENGTH, device=world.device), slots()).wait()
    check_device(total, world)
    reducer.close()
    traffic = ledger.read_and_reset()
    assert traffic.sent > 0
    return traffic.sent, traffic.inter_node, total.shape, total.dtype


def subgroup(size: int, world: World) -> Any:
    ledger = Ledger(world.device)
    made = WorkerSubgroup(world, size, ledger)
    x = torch.ones(4, 3, device=world.device, requires_grad=True)
    results = made.spread(x), made.total(x), made.logsumexp(x), made.gather(x.detach())
    torch.stack([result.sum() for result in results]).sum().backward()
    for result in (*results, x.grad):
        check_device(result, world)
    made.min(3)
    traffic = ledger.read_and_reset()
    return [result.shape for result in results], traffic.sent, traffic.inter_node


def batch_norm(world: World) -> Any:
    ledger = Ledger(world.device)
    norm = nn.BatchNorm2d(3).to(world.device)
    x = torch.rand(4, 3, 5, 5, device=world.device, requires_grad=True)
    scope = ScopedBatchNorm(WorkerSubgroup(world, world.size, ledger))
    with scope.patch(norm, 4):
        norm(x).sum().backward()
    for tensor in (x.grad, norm.running_mean, norm.weight.grad):
        check_device(tensor, world)
    return ledger.read_and_reset().sent


def fsdp(world: World) -> Any:
    """Two groups of shards: the gradients are also summed over the replicas."""
    net = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 4)).to(world.device)
    made = ShardedExchange(net, world, size=world.size // 2, quantizer=QUANTIZERS["bucket"](bits=8))
    made.begin(0, 0)
    made(torch.rand(3, 5, device=world.device)).sum().backward()
    receive = made.all_gather_stats(torch.ones(2, device=world.device))
    gradients = [p.grad.to_local() for p in net.parameters()]  # type: ignore[union-attr]
    for gradient in gradients:
        check_device(gradient, world)
    traffic = made.ledger.read_and_reset()
    return [g.shape for g in gradients], receive().shape, traffic.sent, traffic.inter_node


def check_device(tensor: Tensor | None, world: World) -> None:
    assert tensor is not None
    assert tensor.device.type == world.device.type and world.device.type in ("cpu", KIND)
