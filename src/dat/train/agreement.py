"""Whether the workers are of one mind: those that are not would wait for each other for ever, or
drift apart without a word."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from dat.comm import World, local_of
from dat.data import Supply


class Disagreement(ValueError):
    """Workers were given different things; every worker raises it alike."""

    everywhere = True


class Diverged(ArithmeticError):
    """Replicas are not alike any more; every worker raises it."""

    everywhere = True


def check_data(supply: Supply, batch: int, world: World) -> None:
    """All workers take as many steps, from parts of the same sizes."""
    told = [supply.steps, batch, *(source.plan.sizes for source in supply.sources)]
    if len(set(_everyones(str(told).encode(), world))) > 1:
        raise Disagreement(
            "the workers do not have the same data: other sizes, another number of parts, or "
            "another batch; compare the manifests of the parts, and the configs"
        )


def check_replicas(model: nn.Module, world: World, every: int = 1) -> None:
    """All workers have the same weights, to the last bit; who has not is named. Of a sharded model
    that is every so many-th worker, and they have the same parts."""
    plain = (local_of(it).cpu().contiguous().reshape(-1) for it in model.state_dict().values())
    weights = b"".join(it.view(torch.uint8).numpy().tobytes() for it in plain)
    everyone, odd = _everyones(weights, world), []
    for first in range(every):
        alike = everyone[first::every]
        usual = max(set(alike), key=alike.count)
        odd += [first + every * row for row, found in enumerate(alike) if found != usual]
    if odd:
        names = ", ".join(map(str, sorted(odd)))
        raise Diverged(
            f"the weights of worker {names} are not those of the others: a broken "
            "machine, or a model whose code differs between workers; the last checkpoint is good"
        )


def _everyones(data: bytes, world: World) -> list[int]:
    """A digest of what each worker has."""
    digest = hashlib.blake2b(data, digest_size=8).digest()
    found = world.gather(torch.frombuffer(bytearray(digest), dtype=torch.int64))
    return [int(value) for value in found.flatten()]
