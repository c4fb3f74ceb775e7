"""`dat bench comm`: the time that workers take to sum a gradient, and the bytes they send."""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dat.core import devices
from dat.core.settings import SettingError
from dat.distributed import PROTOCOLS, Hybrid, Ledger, Protocol, Quantizer, Reducer, World
from dat.distributed.affinity import cores
from dat.distributed.wire_format import Slot
from dat.jobs.launch import dat_command
from dat.models import build_model
from dat.report import counting
from dat.tools.bench.cases import check_protocols, make_quantizer
from dat.tools.bench.link import check_link, testbed
from dat.tools.bench.workers import LOCAL, run_workers

BUCKET = 25 * 2**20 // 4
"""Values in a bucket of DDP."""


@dataclass(frozen=True)
class CommPlan:
    """What to measure."""

    model: str = "resnet50"
    values: int | None = None
    """The length of the gradient (default: the model's)."""
    bits: tuple[int, ...] = (32, 8, 4)
    protocols: tuple[str, ...] = ("dense", "gather", "server", "chunked", "ring")
    quantizer: str = "bucket"
    repeats: int = 5
    threads: int | None = None
    inside: int | None = None
    """Workers per host, which is a node of `hybrid` (default: as launched, or 1 on simulated
    hosts)."""

    def cases(self, workers: int) -> list[tuple[str, Quantizer, Protocol]]:
        """Every protocol with every number of bits that it supports."""
        check_protocols(self.protocols)
        cases = []
        for bits in self.bits:
            quantizer = make_quantizer(self.quantizer, bits)
            for name in self.protocols:
                protocol = Hybrid(inside=self.inside) if name == "hybrid" else PROTOCOLS[name]()
                try:
                    protocol.check(quantizer, workers)
                except SettingError:
                    continue
                cases.append((name, quantizer, protocol))
        if not cases:
            raise SettingError("none of these protocols supports any of these bits")
        return cases

    def slots(self) -> list[Slot]:
        """The tensors of the gradient, in the order in which the backward pass computes them."""
        if self.values is not None:
            shapes: list[tuple[int, ...]] = [(1, self.values)]
        else:
            network = build_model(self.model, 1000, channels=3)
            shapes = [tuple(p.shape) for p in network.parameters()]
        slots, position = [], 0
        for shape in shapes:
            slots.append(Slot(shape, position))
            position += math.prod(shape)
        return slots[::-1]


def bench_comm(
    plan: CommPlan, workers: int, links: Sequence[str], words: Sequence[str]
) -> list[dict[str, Any]]:
    """Measure with local processes, or for each of the `links` on simulated hosts; `words` is the
    command that a worker runs."""
    inside = plan.inside or 1
    if workers % inside:
        raise SettingError(f"--inside {inside}: must divide --workers {workers}")
    plan.cases(workers)  # raises errors before anything starts
    plan.slots()
    rows = []
    for link in links:
        check_link(link)
    for link in links or ("loopback",):
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            command = dat_command(*words, "--result", str(result))
            if link == "loopback":
                run_workers([LOCAL] * workers, command)
            else:
                with testbed(workers // inside, link) as hosts:
                    run_workers([host for host in hosts for _ in range(inside)], command)
            rows += [row | {"link": link} for row in json.loads(result.read_text())]
    return rows


def measure_comm(plan: CommPlan, result: Path | None = None) -> list[dict[str, Any]] | None:
    """Run on every worker; the first one returns the rows, or writes them to `result`."""
    threads = plan.threads
    if result and not threads:  # the simulated hosts share the cores of this machine
        threads = max(1, cores() // int(os.environ["WORLD_SIZE"]))
    # the simulated hosts can only be reached through sockets
    with World.join(device="cpu" if result else "auto", threads=threads) as world:
        cases, slots = plan.cases(world.size), plan.slots()
        length = sum(slot.length for slot in slots)
        generator = torch.Generator().manual_seed(world.rank)
        gradient = torch.randn(length, generator=generator).to(world.device)
        ledger = Ledger(world.device)
        readings: list[list[tuple[float, int, int, int]]] = [[] for _ in cases]
        total = len(cases) * (plan.repeats + 1)
        with counting("exchanging", total, show=world.first) as progress:
            for case, (_, quantizer, protocol) in enumerate(cases):
                reducer = Reducer(quantizer, protocol, world, length=length, ledger=ledger)
                buckets = [slots] if quantizer.whole else _buckets(slots)
                for _ in range(plan.repeats + 1):
                    readings[case].append(_exchange(reducer, gradient.clone(), buckets))
                    progress(1)
                reducer.close()
        mine = torch.tensor([case[1:] for case in readings], dtype=torch.float64)
        everyone = world.gather(mine)  # worker, case, repeat, reading
        if not world.first:
            return None
        rows = [
            {"link": "as launched", "protocol": name, "bits": quantizer.bits, "values": length}
            | _row(everyone[:, number], plan.inside or 1)
            for number, (name, quantizer, _) in enumerate(cases)
        ]
        if result:
            result.write_text(json.dumps(rows))
            return None
        return rows


def _exchange(
    reducer: Reducer, gradient: torch.Tensor, buckets: Sequence[Sequence[Slot]]
) -> tuple[float, int, int, int]:
    """One exchange that all workers start at the same time, without a backward pass to overlap:
    seconds, bytes sent and bytes sent to other nodes by the ledger, bytes by the kernel's
    counter."""
    world = reducer.world
    reducer.ledger.read_and_reset()
    before = _counter()  # ahead of the meeting: a neighbor on this host may be quicker
    world.barrier()
    start = time.perf_counter()
    begins, futures = 0, []
    for number, slots in enumerate(buckets):
        length = sum(slot.length for slot in slots)
        futures.append(reducer.sum(number, gradient[begins : begins + length], slots))
        begins += length
    for future in futures:
        future.wait()
    devices.synchronize(world.device)
    seconds = time.perf_counter() - start
    world.barrier()
    traffic = reducer.ledger.read_and_reset()
    return seconds, traffic.sent, traffic.inter_node, _counter() - before


def _buckets(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Buckets like those of DDP; a single large tensor is split too, to be sent in a pipeline."""
    buckets: list[list[Slot]] = [[]]
    for slot in slots:
        pieces = [slot]
        if len(slots) == 1:
            pieces = [
                Slot((1, min(BUCKET, slot.length - at)), slot.position + at)
                for at in range(0, slot.length, BUCKET)
            ]
        for piece in pieces:
            held = sum(other.length for other in buckets[-1])
            if held and held + piece.length > BUCKET:
                buckets.append([])
            buckets[-1].append(piece)
    return buckets


def _row(readings: torch.Tensor, inside: int) -> dict[str, Any]:
    """One row of the table from worker x repeat x (seconds, sent, between, counted); the workers of
    a host read the same counter."""
    slowest = readings[:, :, 0].amax(0).tolist()
    sent, counted = readings[:, -1, 1], readings[::inside, :, 3].median(1).values
    row = {
        "workers": len(readings),
        "seconds": statistics.median(slowest),
        "all_seconds": slowest,
        "bytes": int(sent.sum()),
        "bytes_busiest": int(sent.max()),
        "bytes_between": int(readings[:, -1, 2].sum()),
    }
    return row | {"bytes_interface": int(counted.sum())} if counted.sum() else row


def _counter() -> int:
    """Bytes sent by this host's network interface, as counted by the kernel; 0 for the loopback."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    path = Path("/proc/net/dev")
    if name == "lo" or not path.exists():
        return 0
    for line in path.read_text().splitlines():
        interface, colon, numbers = line.partition(":")
        if colon and interface.strip() == name:
            return int(numbers.split()[8])
    return 0
