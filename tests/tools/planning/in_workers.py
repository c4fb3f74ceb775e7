"""Real exchanges to compare the planner with, and a calibration, run by workers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dat.distributed import (
    Buckets,
    Chunked,
    Dense,
    Exchange,
    Gather,
    PerTensor,
    Protocol,
    Quantizer,
    Ring,
    Server,
    WholeVector,
    World,
)
from dat.distributed.wire_format import Slot
from dat.models import build_model
from dat.tools.planning import calibration

CASES: dict[str, tuple[Quantizer, Protocol]] = {
    "dense": (Buckets(), Dense()),
    "gather": (Buckets(bits=3), Gather()),
    "gather vector": (WholeVector(bits=8), Gather()),
    "server": (PerTensor(bits=4), Server()),
    "chunked": (Buckets(bits=4), Chunked()),
    "chunked floats": (Buckets(), Chunked()),
    "ring": (Buckets(bits=8), Ring()),
}


def network() -> torch.nn.Module:
    """Large enough for two buckets."""
    return build_model("preact-resnet18", 10, channels=1, width=16)


def images() -> Tensor:
    return torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def exchange(world: World, quantizer: Quantizer, protocol: Protocol) -> dict[str, Any]:
    """Bytes of the third step, without metrics and statistics, and the buckets of DDP."""
    found = Exchange(network(), world, quantizer=quantizer, protocol=protocol)
    buckets: list[list[tuple[int, int]]] = []
    hand_over = found.reducer.sum

    def seen(index: int, gradient: Tensor, slots: Sequence[Slot]) -> Any:
        buckets.append([(slot.position, slot.length) for slot in slots])
        return hand_over(index, gradient, slots)

    for _ in range(3):
        buckets.clear()
        found.reducer.sum = seen  # type: ignore[method-assign]
        found.ledger.read_and_reset()
        found(images()).square().mean().backward()
    sent = found.ledger.read_and_reset().sent
    found.close()
    return {"sent": sent, "buckets": buckets}


def main(folder: Path) -> None:
    with World.join(threads=1) as world:
        seen = {name: exchange(world, *case) for name, case in CASES.items()}
        (folder / f"{world.rank}.json").write_text(json.dumps(seen))


def calibrate(result: Path) -> None:
    """Calibrate with a few small messages."""
    calibration.VALUES, calibration.LARGE = 40_000, 1 << 16
    calibration.ROUNDS, calibration.TINY_ROUNDS = 2, 3
    calibration.measure(result)
