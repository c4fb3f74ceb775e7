"""Every protocol's sum of gradients, against the float64 sum that each worker computes by itself.

A value quantized with step size s is off by less than s, and its expectation is exact. So for each
value the errors of the workers' roundings, and of the sum's where it is quantized again, add up to
a bound that no exchange may exceed, and the mean over several exchanges has to come as much closer
as that of independent errors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from dat.core.settings import SettingError
from dat.distributed import (
    CONCRETE_PROTOCOLS,
    Buckets,
    Hybrid,
    Ledger,
    Protocol,
    Quantizer,
    Reducer,
    Server,
    World,
)
from dat.distributed.wire_format import Slot, spans
from dat.tools.selftest.result import Context, Result, failed, passed

BUCKETS: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((2, 1999), (1, 1), (3, 5, 7)),
    ((513,), (7,), (40, 31)),
)
"""The shapes of the tensors in each bucket, in order of their place in the gradient."""
BITS = (32, 8, 4)
ROUNDS = 8
"""Exchanges whose mean has to be close to the exact sum."""
GUARD = 64
"""Values before and after a bucket, which must not change."""
FLOAT_ERROR = 2e-6
"""Error of a sum of float32, relative to the sum of magnitudes; 32 workers round 32 times."""
LARGEST_BIAS = 2.0
"""The mean square of the mean error, relative to its expectation, which is the variance of an
error by the number of rounds. The average over thousands of values is close to 1."""


class Case(NamedTuple):
    name: str
    quantizer: Quantizer
    protocol: Protocol


def protocols(context: Context) -> Result:
    """Every registered protocol with 32, 8 and 4 bits, as far as it supports them."""
    wrong, errors, count = {}, {}, 0
    for number, case in enumerate(cases(context.world)):
        exchange = _Exchanged.of(context, case, number)
        problem = exchange.problem()
        if different := context.same_on_all_workers(exchange.digest):
            ranks = ", ".join(map(str, different))
            problem = problem or f"the sums of workers {ranks} and 0 differ"
        if problem:
            wrong[case.name] = problem
        errors[case.name] = exchange.largest_error
        count += 1
    if wrong:
        name, problem = next(iter(wrong.items()))
        return failed(f"{len(wrong)} of {count}: {name}: {problem}", wrong=wrong, errors=errors)
    names = len({name.partition(" ")[0] for name in errors})
    return passed(
        f"{names} protocols, {count} cases: floats exact, codes in bounds, unbiased",
        errors=errors,
    )


def cases(world: World) -> list[Case]:
    """The registered protocols with every number of bits that they support."""
    workers = world.size
    nodes = [n for n in sorted({1, 2, world.local_size, workers}) if workers % n == 0]
    variants: dict[str, Callable[[], Sequence[Protocol]]] = {
        "hybrid": lambda: [Hybrid(inside=inside) for inside in nodes],
        "server": lambda: [Server(rank=rank) for rank in sorted({0, workers - 1})],
    }
    chosen = []
    for name, kind in CONCRETE_PROTOCOLS.items():
        variant = variants[name]() if name in variants else [kind()]
        for protocol in variant:
            for bits in BITS:
                quantizer = Buckets(bits=bits)
                try:
                    protocol.check(quantizer, workers)
                except SettingError:
                    continue
                number = f" {variant.index(protocol) + 1}" if len(variant) > 1 else ""
                chosen.append(Case(f"{name} {bits} bits{number}", quantizer, protocol))
    return chosen


@dataclass
class _Exchanged:
    """The results of a case: rounds x values, in the order of the buckets."""

    case: Case
    sums: Tensor
    exact: Tensor
    magnitude: Tensor
    """Sum over workers of the largest magnitude that shares a step size with the value."""
    quantized: Tensor
    """Which values are quantized."""
    workers: int
    guards_changed: bool

    @classmethod
    def of(cls, context: Context, case: Case, number: int) -> _Exchanged:
        buckets = _slots()
        length = sum(slot.length for slots in buckets for slot in slots)
        gradients = [_gradient(context, rank, length) for rank in range(context.world.size)]
        groups = _groups(buckets, case.quantizer)
        largest = torch.stack([_largest(gradient, groups) for gradient in gradients])
        sums, changed = _sum(context, case, number, gradients[context.world.rank], buckets)
        return cls(
            case,
            sums.double(),
            torch.stack(gradients).double().sum(0),
            largest.double().sum(0),
            groups >= 0,
            context.world.size,
            changed,
        )

    @property
    def digest(self) -> int:
        data = self.sums.numpy().tobytes()
        return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest())

    @property
    def largest_error(self) -> float:
        """In units of the largest magnitude."""
        return float((self.sums - self.exact).abs().max() / self.exact.abs().max())

    def problem(self) -> str:
        """What is wrong with the sums, or nothing."""
        if self.guards_changed:
            return "wrote outside of its bucket"
        steps = self.magnitude / self._levels()
        first = steps * self.quantized  # the workers' roundings
        second = (self.magnitude + first) / self._levels() * self.quantized
        bound = first + second + FLOAT_ERROR * self.magnitude
        excess = ((self.sums - self.exact).abs() - bound).amax(0)
        wrong = (~(excess <= 0)).nonzero().flatten().tolist()
        if wrong:
            return (
                f"{len(wrong)} of {len(self.exact)} values are off by more than their rounding, "
                f"first {wrong[0]}, last {wrong[-1]}"
            )
        return self._bias()

    def _levels(self) -> int:
        if self.case.quantizer.dense:
            return 1  # no value is quantized
        return self.case.protocol.levels(self.case.quantizer, self.workers)

    def _bias(self) -> str:
        """Whether the mean over the rounds is further from the exact sum than their spread
        explains."""
        if self.case.quantizer.dense:
            return ""
        errors = (self.sums - self.exact)[:, self.quantized]
        bias = errors.mean(0).square().mean()
        expected = errors.var(0).mean() / len(errors)
        if bias <= LARGEST_BIAS * expected:
            return ""
        ratio = float((bias / expected).sqrt())
        return f"biased: the mean of {len(errors)} sums is {ratio:.1f} standard errors off"


def _slots() -> list[list[Slot]]:
    """The buckets, as backward passes fill them: the last tensors come first."""
    lengths = [torch.Size(shape).numel() for bucket in BUCKETS for shape in bucket]
    starts = [0, *accumulate(lengths)]
    shapes = [shape for bucket in BUCKETS for shape in bucket]
    slots = [Slot(shape, start) for shape, start in zip(shapes, starts[:-1], strict=True)]
    return [slots[len(BUCKETS[0]) :], slots[: len(BUCKETS[0])]]


def _gradient(context: Context, rank: int, length: int) -> Tensor:
    """A worker's gradient, in the order of the buckets. The values at both ends of each tensor are
    large and have the same sign on all workers, so that none of them can be lost in the noise."""
    gradient = torch.randn(length, generator=context.generator("protocols", rank)).clamp(-3, 3)
    start = 0
    for slots in _slots():
        for slot in slots:
            gradient[start] = 4.0 + rank / 8
            gradient[start + slot.length - 1] = -4.0 - rank / 8
            start += slot.length
    return gradient


def _groups(buckets: Sequence[Sequence[Slot]], quantizer: Quantizer) -> Tensor:
    """The number of the group that each value shares a step size with; -1 for floats."""
    groups, number = [], 0
    for slots in buckets:
        for span in spans(slots, quantizer):
            if not span.group:
                groups.append(torch.full((span.length,), -1))
                continue
            groups.append(number + torch.arange(span.length) // span.group)
            number += -(-span.length // span.group)
    return torch.cat(groups)


def _largest(gradient: Tensor, groups: Tensor) -> Tensor:
    """The largest magnitude in each value's group; of floats, their own."""
    largest = torch.zeros(int(groups.max().clamp(min=0)) + 1)
    coded = groups >= 0
    largest = largest.scatter_reduce(0, groups[coded], gradient[coded].abs(), "amax")
    return torch.where(coded, largest[groups.clamp(min=0)], gradient.abs())


def _sum(
    context: Context,
    case: Case,
    number: int,
    gradient: Tensor,
    buckets: Sequence[Sequence[Slot]],
) -> tuple[Tensor, bool]:
    """The sums of several rounds, and whether anything but the buckets was written to. All buckets
    are in flight at once."""
    ledger = Ledger(context.device)
    seed = context.key("protocols", number)
    reducer = Reducer(
        case.quantizer, case.protocol, context.world, length=len(gradient), ledger=ledger, seed=seed
    )
    lengths = [sum(slot.length for slot in slots) for slots in buckets]
    results, changed = [], False
    for step in range(1 if case.quantizer.dense else ROUNDS):
        reducer.begin(0, step)
        memory = [
            torch.nn.functional.pad(part, (GUARD, GUARD), value=7.0).to(context.device)
            for part in gradient.split(lengths)
        ]
        views = [padded[GUARD:-GUARD] for padded in memory]
        futures = [
            reducer.sum(index, view, slots)
            for index, (view, slots) in enumerate(zip(views, buckets, strict=True))
        ]
        for future in futures:
            future.wait()
        results.append(torch.cat([view.cpu() for view in views]))
        guards = torch.cat([torch.cat([padded[:GUARD], padded[-GUARD:]]) for padded in memory])
        changed |= bool((guards != 7.0).any())
    reducer.close()
    return torch.stack(results), changed
