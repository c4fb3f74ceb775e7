"""A network's gradient as the exchange sees it: which tensors become ready when, in which buckets.

torch's DistributedDataParallel hands over a bucket when all gradients in it are there. It fills
buckets in the order in which the backward pass gave the gradients of the first step, and closes one
as soon as it holds 25 MiB, the first one 1 MiB.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from dat.comm.message import FLOAT, Slot

FIRST = 1 << 20
CAP = 25 << 20
NOTES = 5
"""Numbers that a worker tells the others in every step: loss, right answers and so on."""


class Bucket(NamedTuple):
    """What is exchanged in one go."""

    slots: tuple[Slot, ...]
    ready: float
    """When the backward pass has filled it, as a part of that pass."""

    @property
    def values(self) -> int:
        return sum(slot.length for slot in self.slots)


@dataclass(frozen=True)
class Gradient:
    """The tensors in the order in which the backward pass fills them."""

    slots: tuple[Slot, ...]
    ready: tuple[float, ...]
    """When each is there, as a part of the backward pass; never falls."""
    told: int = 0
    """Numbers that each worker sends to all others besides: statistics of batch normalisation."""

    def __post_init__(self) -> None:
        assert len(self.slots) == len(self.ready)

    @property
    def values(self) -> int:
        return sum(slot.length for slot in self.slots)

    def buckets(self, *, whole: bool = False) -> list[Bucket]:
        """As DDP cuts it; a quantizer whose group is the whole gradient gets one bucket."""
        found: list[Bucket] = []
        held: list[Slot] = []
        for slot, ready in zip(self.slots, self.ready, strict=True):
            held.append(slot)
            limit = CAP if found else FIRST
            if not whole and FLOAT * sum(it.length for it in held) >= limit:
                found.append(Bucket(tuple(held), ready))
                held = []
        if held:
            found.append(Bucket(tuple(held), self.ready[-1]))
        if whole:  # in the order of the whole gradient
            ordered = sorted(found[0].slots, key=lambda slot: slot.position)
            found = [Bucket(tuple(ordered), 1.0)]
        return found


def even(values: int, tensors: int = 1) -> Gradient:
    """A gradient of equal matrices that become ready one after the other, evenly."""
    length = -(-values // tensors)
    sizes = [min(length, values - at) for at in range(0, values, length)]
    slots = [Slot((1, size), length * number) for number, size in enumerate(sizes)]
    ready = [(number + 1) / len(sizes) for number in range(len(sizes))]
    return Gradient(tuple(slots[::-1]), tuple(ready))


def slots_of(model: nn.Module) -> dict[str, Slot]:
    """The tensors that learn, at their positions in the whole gradient."""
    found, position = {}, 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[name] = Slot(tuple(parameter.shape), position)
            position += parameter.numel()
    return found


def watch_backward(
    model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor], *, repeats: int = 3
) -> Gradient:
    """Take some backward passes and see when each gradient is there; medians."""
    slots = slots_of(model)
    times: dict[str, list[float]] = {name: [] for name in slots}

    def note(name: str) -> Callable[[Tensor], None]:
        return lambda parameter: times[name].append(time.perf_counter())

    hooks = [
        parameter.register_post_accumulate_grad_hook(note(name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    passes = []
    try:
        for _ in range(repeats + 1):
            model.zero_grad()
            outcome = loss(model(x))
            start = time.perf_counter()
            outcome.backward()
            passes.append((start, time.perf_counter()))
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad()
    missing = [name for name, seen in times.items() if len(seen) != len(passes)]
    if missing:
        raise ValueError(f"parameter {missing[0]} has no part in the loss, so it cannot be trained")
    parts = {
        name: [(at - start) / (end - start) for at, (start, end) in zip(seen, passes, strict=True)]
        for name, seen in times.items()
    }
    medians = {name: float(torch.tensor(seen[1:]).median()) for name, seen in parts.items()}
    order = sorted(medians, key=lambda name: medians[name])
    return Gradient(
        tuple(slots[name] for name in order),
        tuple(min(medians[name], 1.0) for name in order),
        told=NOTES + statistics_of(model),
    )


def statistics_of(model: nn.Module) -> int:
    """The running means and variances, which travel in every step."""
    norms: Sequence[_NormBase] = [it for it in model.modules() if isinstance(it, _NormBase)]
    kept = [it.running_mean for it in norms if it.running_mean is not None]
    return sum(2 * mean.numel() for mean in kept)
