"""The choice of a protocol: as set, by default, or by measuring which one is faster."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import torch

from dat.core import devices
from dat.distributed.protocols import (
    Auto,
    Chunked,
    DeferredProtocol,
    Dense,
    Gather,
    Protocol,
)
from dat.distributed.quantizers import DENSE, Buckets, Quantizer
from dat.distributed.reducer import Reducer
from dat.distributed.traffic import Ledger
from dat.distributed.wire_format import Slot
from dat.distributed.world import World

PROBE = 4_000_000
"""Values that are exchanged, at most, to measure how fast the link is."""
ROUNDS = 3


def choose(
    quantizer: Quantizer, protocol: Protocol, world: World, length: int
) -> tuple[Quantizer, Protocol]:
    """The protocol that exchanges a gradient of `length` values, and the quantizer it uses.

    All workers call this and get the same.
    """
    if not isinstance(protocol, DeferredProtocol):
        return quantizer, protocol
    dense = replace(quantizer, bits=DENSE)
    if quantizer.dense or not length:
        return dense, Dense()
    if not isinstance(protocol, Auto):
        return quantizer, choose_default(quantizer, protocol)
    if world.size == 1 or not _chunked_is_faster(quantizer, dense, world, min(length, PROBE)):
        return dense, Dense()
    return quantizer, Chunked()


def choose_default(quantizer: Quantizer, protocol: Protocol) -> Protocol:
    """The protocol itself, or the default one if it is `default` or `auto`; measures nothing."""
    if not isinstance(protocol, DeferredProtocol):
        return protocol
    if quantizer.dense:
        return Dense()
    return Chunked() if isinstance(quantizer, Buckets) else Gather()


def _chunked_is_faster(quantizer: Quantizer, dense: Quantizer, world: World, length: int) -> bool:
    """Sum the same vector by both protocols, in turns; the slowest worker's median counts."""
    slots = [Slot((1, length), 0)]
    vector = torch.linspace(-1.0, 1.0, length, device=world.device)
    candidates: tuple[tuple[Quantizer, Protocol], ...] = ((quantizer, Chunked()), (dense, Dense()))
    reducers = [
        Reducer(*candidate, world, length=length, ledger=Ledger(world.device))
        for candidate in candidates
    ]
    seconds: list[list[float]] = [[], []]
    for _ in range(ROUNDS + 1):  # the first one warms up
        for reducer, times in zip(reducers, seconds, strict=True):
            world.barrier()
            start = time.perf_counter()
            reducer.sum(0, vector.clone(), slots).wait()
            devices.synchronize(world.device)
            times.append(time.perf_counter() - start)
    for reducer in reducers:
        reducer.close()
    own = torch.tensor([statistics.median(times[1:]) for times in seconds], dtype=torch.float64)
    chunked_seconds, dense_seconds = world.gather(own).amax(0).tolist()
    return bool(chunked_seconds < dense_seconds)
