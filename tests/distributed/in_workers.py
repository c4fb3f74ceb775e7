"""Every protocol of the registry on real workers: its sums, and the bytes in the ledger."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dat.core.settings import SettingError
from dat.distributed import (
    CONCRETE_PROTOCOLS,
    Buckets,
    Ledger,
    PerTensor,
    Quantizer,
    Reducer,
    WholeVector,
    World,
)
from dat.distributed.wire_format import Slot
from tests.distributed.cases import slots_of


class Nodes(NamedTuple):
    """Where the workers of these tests are, in the words of a plan."""

    nodes: int
    devices: int
    shared: bool = False

    @property
    def workers(self) -> int:
        return self.nodes * self.devices

    @property
    def together(self) -> int:
        return self.devices


NODES = Nodes(nodes=2, devices=2)
QUANTIZERS: dict[str, Quantizer] = {
    "floats": Buckets(),
    "bucket 8": Buckets(bits=8),
    "bucket 4": Buckets(bits=4),
    "tensor 8": PerTensor(bits=8),
    "vector 4": WholeVector(bits=4),
}
GRADIENTS: dict[str, list[Slot]] = {
    "even": slots_of((NODES.workers, 3 * 512)),
    "uneven": slots_of((40, 30), (7,), (513,), (3, 5, 7), (1, 1), (2, 1999)),
}
"""One that can be cut evenly among nodes and workers, and one that cannot."""


def cases() -> list[tuple[str, str]]:
    """Every protocol that exchanges gradients, with every quantizer that it accepts."""
    accepted = []
    for protocol, kind in CONCRETE_PROTOCOLS.items():
        for name, quantizer in QUANTIZERS.items():
            try:
                kind().check(quantizer, NODES.workers)
            except SettingError:
                continue
            accepted.append((protocol, name))
    return accepted


def values(gradient: str, rank: int) -> Tensor:
    length = sum(slot.length for slot in GRADIENTS[gradient])
    return torch.randn(length, generator=torch.Generator().manual_seed(rank))


def exchange(world: World, protocol: str, quantizer: str) -> dict[str, Any]:
    """The sums of both gradients, and what this worker sent for each."""
    ledger, observed = Ledger(world.device), {}
    reducer = Reducer(
        QUANTIZERS[quantizer],
        CONCRETE_PROTOCOLS[protocol](),
        world,
        length=max(sum(slot.length for slot in slots) for slots in GRADIENTS.values()),
        ledger=ledger,
    )
    for number, (name, slots) in enumerate(GRADIENTS.items()):
        total = reducer.sum(number, values(name, world.rank), slots).wait()
        exact = torch.stack([values(name, rank).double() for rank in range(world.size)]).sum(0)
        traffic = ledger.read_and_reset()
        observed[name] = {
            "sent": traffic.sent,
            "between": traffic.inter_node,
            "digest": hashlib.sha256(total.numpy().tobytes()).hexdigest(),
            "error": float((total - exact).norm() / exact.norm()),
        }
    reducer.close()
    return observed


def main(folder: Path) -> None:
    """The workers of one machine, as if they had been launched on several nodes."""
    with World.join(threads=1) as world:
        local_rank = world.rank % NODES.devices
        placed = replace(world, local_rank=local_rank, local_size=NODES.devices)
        observed = {" ".join(case): exchange(placed, *case) for case in cases()}
        (folder / f"{world.rank}.json").write_text(json.dumps(observed))
