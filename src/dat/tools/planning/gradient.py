"""A network's gradient as the exchange sees it: when each tensor is ready, and in which bucket.

torch's DistributedDataParallel hands over a bucket when all gradients in it are ready. It fills
buckets in the order in which the first backward pass computed the gradients, and closes one as soon
as it holds 25 MiB, the first one 1 MiB.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from dat.distributed.wire_format import Slot
from dat.kernels.quantize.layout import FLOAT

FIRST = 1 << 20
CAP = 25 << 20
METRICS = 5
"""Values that workers exchange in every step: loss, correct predictions and so on."""


class TimedBucket(NamedTuple):
    """Tensors that are exchanged together."""

    slots: tuple[Slot, ...]
    ready: float
    """When the bucket is full, as a fraction of the backward pass."""

    @property
    def values(self) -> int:
        return sum(slot.length for slot in self.slots)


@dataclass(frozen=True)
class Gradient:
    """The tensors in the order in which the backward pass computes them."""

    slots: tuple[Slot, ...]
    ready: tuple[float, ...]
    """When each is ready, as a fraction of the backward pass; non-decreasing."""
    extra_values: int = 0
    """Other values that each worker sends to all others: metrics, batch-norm statistics."""

    def __post_init__(self) -> None:
        assert len(self.slots) == len(self.ready)

    @property
    def values(self) -> int:
        return sum(slot.length for slot in self.slots)

    def buckets(self, *, whole: bool = False) -> list[TimedBucket]:
        """The buckets of DDP; or a single one, for a quantizer that needs the whole gradient."""
        buckets: list[TimedBucket] = []
        filling: list[Slot] = []
        for slot, ready in zip(self.slots, self.ready, strict=True):
            filling.append(slot)
            limit = CAP if buckets else FIRST
            if not whole and FLOAT * sum(slot.length for slot in filling) >= limit:
                buckets.append(TimedBucket(tuple(filling), ready))
                filling = []
        if filling:
            buckets.append(TimedBucket(tuple(filling), self.ready[-1]))
        if whole:  # in the order of the parameters
            ordered = sorted(buckets[0].slots, key=lambda slot: slot.position)
            buckets = [TimedBucket(tuple(ordered), 1.0)]
        return buckets


def even(values: int, tensors: int = 1) -> Gradient:
    """A gradient of equal matrices that become ready at equal intervals."""
    length = -(-values // tensors)
    sizes = [min(length, values - start) for start in range(0, values, length)]
    slots = [Slot((1, size), length * number) for number, size in enumerate(sizes)]
    ready = [(number + 1) / len(sizes) for number in range(len(sizes))]
    return Gradient(tuple(slots[::-1]), tuple(ready))


def slots_of(model: nn.Module) -> dict[str, Slot]:
    """The trainable tensors, at their positions in the flat gradient."""
    slots, position = {}, 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            slots[name] = Slot(tuple(parameter.shape), position)
            position += parameter.numel()
    return slots


def watch_backward(
    model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor], *, repeats: int = 3
) -> Gradient:
    """Run some backward passes and record when each gradient is ready; medians."""
    slots = slots_of(model)
    times: dict[str, list[float]] = {name: [] for name in slots}

    def record(name: str) -> Callable[[Tensor], None]:
        return lambda parameter: times[name].append(time.perf_counter())

    hooks = [
        parameter.register_post_accumulate_grad_hook(record(name))
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
    missing = [name for name, stamps in times.items() if len(stamps) != len(passes)]
    if missing:
        raise ValueError(
            f"parameter {missing[0]} does not affect the loss, so it cannot be trained"
        )
    medians = {}
    for name, stamps in times.items():
        fractions = [
            (stamp - start) / (end - start)
            for stamp, (start, end) in zip(stamps, passes, strict=True)
        ]
        medians[name] = float(torch.tensor(fractions[1:]).median())
    order = sorted(medians, key=lambda name: medians[name])
    return Gradient(
        tuple(slots[name] for name in order),
        tuple(min(medians[name], 1.0) for name in order),
        extra_values=METRICS + statistics_of(model),
    )


def statistics_of(model: nn.Module) -> int:
    """The number of running means and variances, which are exchanged in every step."""
    norms: Sequence[_NormBase] = [m for m in model.modules() if isinstance(m, _NormBase)]
    means = [norm.running_mean for norm in norms if norm.running_mean is not None]
    return sum(2 * mean.numel() for mean in means)
