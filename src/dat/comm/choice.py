"""Which protocol: the one that was asked for, the default, or the one that is measured to pay."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import torch

from dat.comm.ledger import Ledger
from dat.comm.message import Slot
from dat.comm.protocols import Auto, Chunked, Default, Dense, Gather, Protocol
from dat.comm.quantizer import DENSE, Buckets, Quantizer
from dat.comm.reducer import Reducer
from dat.comm.world import World

PROBE = 4_000_000
"""Values that are exchanged to see how fast the link is, at most."""
ROUNDS = 3


def choose(
    quantizer: Quantizer, protocol: Protocol, world: World, length: int
) -> tuple[Quantizer, Protocol]:
    """The protocol that is meant for a gradient of `length` values, and the quantizer it uses.

    All workers call it and get the same.
    """
    if isinstance(protocol, Default | Auto) and (quantizer.dense or not length):
        return replace(quantizer, bits=DENSE), Dense()
    if isinstance(protocol, Default):
        return quantizer, choose_default(quantizer, protocol)
    if isinstance(protocol, Auto):
        dense = replace(quantizer, bits=DENSE)
        if world.size == 1 or not _pays(quantizer, dense, world, min(length, PROBE)):
            return dense, Dense()
        return quantizer, Chunked()
    return quantizer, protocol


def choose_default(quantizer: Quantizer, protocol: Protocol) -> Protocol:
    """What is used when nothing else is said, and nothing is measured."""
    if not isinstance(protocol, Default | Auto):
        return protocol
    if quantizer.dense:
        return Dense()
    return Chunked() if isinstance(quantizer, Buckets) else Gather()


def _pays(quantizer: Quantizer, dense: Quantizer, world: World, length: int) -> bool:
    """Sum the same vector both ways, in turns; the slowest worker's median counts."""
    slots = [Slot((1, length), 0)]
    vector = torch.linspace(-1.0, 1.0, length, device=world.device)
    ways = [
        Reducer(how, way, world, length=length, ledger=Ledger(world.device))
        for how, way in ((quantizer, Chunked()), (dense, Dense()))
    ]
    seconds: list[list[float]] = [[], []]
    for _ in range(ROUNDS + 1):  # the first one warms up
        for way, times in zip(ways, seconds, strict=True):
            world.meet()
            start = time.perf_counter()
            way.sum(0, vector.clone(), slots).wait()
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    for way in ways:
        way.close()
    mine = torch.tensor([statistics.median(times[1:]) for times in seconds], dtype=torch.float64)
    quantized, plain = world.gather(mine).amax(0).tolist()
    return bool(quantized < plain)
