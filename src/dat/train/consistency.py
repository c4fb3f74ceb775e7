"""Consistency checks between workers. Without them, workers with different data would wait for each
other forever, and replicas with different weights would silently drift apart."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from dat.data import Batches
from dat.distributed import World, local_tensor


class Disagreement(ValueError):
    """The workers' inputs differ; every worker raises it."""

    everywhere = True


class Diverged(ArithmeticError):
    """The replicas' weights differ; every worker raises it."""

    everywhere = True


def check_data(batches: Batches, batch: int, world: World) -> None:
    """Raise unless all workers take the same number of steps, from partitions of the same sizes."""
    inputs = [batches.steps, batch, *(source.sampler.sizes for source in batches.sources)]
    if len(set(_gather_digests(str(inputs).encode(), world))) > 1:
        raise Disagreement(
            "the workers do not have the same data: sizes, number of partitions or batch size "
            "differ; compare the manifests of the partitions, and the configs"
        )


def check_replicas(model: nn.Module, world: World, every: int = 1) -> None:
    """Raise unless all workers hold bitwise identical weights; the error names those that do not.
    In a sharded model, ranks that are a multiple of `every` apart hold the same shard."""
    tensors = (
        local_tensor(value).cpu().contiguous().reshape(-1) for value in model.state_dict().values()
    )
    weights = b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors)
    digests, deviating = _gather_digests(weights, world), []
    for first in range(every):
        replicas = digests[first::every]
        majority = max(set(replicas), key=replicas.count)
        deviating += [
            first + every * row for row, digest in enumerate(replicas) if digest != majority
        ]
    if deviating:
        ranks = ", ".join(map(str, sorted(deviating)))
        raise Diverged(
            f"the weights of worker {ranks} differ from those of the others: faulty hardware, or "
            "model code that differs between workers; the last checkpoint is good"
        )


def _gather_digests(data: bytes, world: World) -> list[int]:
    """Each worker's digest of its own data, by rank."""
    digest = hashlib.blake2b(data, digest_size=8).digest()
    gathered = world.gather(torch.frombuffer(bytearray(digest), dtype=torch.int64))
    return [int(value) for value in gathered.flatten()]
