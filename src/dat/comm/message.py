"""Which bytes stand for which values: the layout of messages, the same at every worker.

A message holds, in this order, the steps of its groups, the values that are sent as floats, and the
packed codes. A gradient that is shared out among M workers is cut into M messages of one size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dat.comm.quantizer import Quantizer

FLOAT = 4


class Run(NamedTuple):
    """A stretch of the gradient and its place in a message; kernel.c has the same."""

    start: int
    length: int
    group: int
    """Values that share a step; 0: they are sent as floats."""
    floats: int
    """Where in the message its steps begin, or its floats."""
    codes: int
    """Where in the message its codes begin."""
    position: int
    """Of its first value in the whole gradient: what the random rounding depends on."""

    @property
    def groups(self) -> int:
        return -(-self.length // self.group) if self.group else 0


@dataclass(frozen=True)
class Message:
    """The layout of one message."""

    runs: tuple[Run, ...]
    steps: int
    """How many steps it begins with."""
    floats: int
    """How many values follow as floats."""
    codes: int
    """Bytes of codes."""

    @property
    def size(self) -> int:
        return FLOAT * (self.steps + self.floats) + self.codes

    @cached_property
    def in_whole(self) -> Message:
        """The same message, of values that stand at their position in the whole gradient."""
        return replace(self, runs=tuple(run._replace(start=run.position) for run in self.runs))

    @cached_property
    def table(self) -> npt.NDArray[np.int64]:
        """The runs as the kernel reads them."""
        return np.array(self.runs, dtype=np.int64).reshape(-1, len(Run._fields))


class Slot(NamedTuple):
    """A tensor's place in the whole gradient, which does not depend on how that is cut up."""

    shape: tuple[int, ...]
    position: int

    @property
    def length(self) -> int:
        return math.prod(self.shape)


class Span(NamedTuple):
    """Neighbouring values of a bucket that are sent in the same way."""

    start: int
    length: int
    group: int
    position: int


def spans(slots: Sequence[Slot], quantizer: Quantizer) -> list[Span]:
    """The tensors that follow each other in a bucket; one span, if a group spans all of them."""
    if quantizer.whole and not quantizer.dense:
        length = sum(slot.length for slot in slots)
        return [Span(0, length, quantizer.group(length), slots[0].position)] if length else []
    found, start = [], 0
    for slot in slots:
        group = 0 if quantizer.keeps(slot.shape) else quantizer.group(slot.length)
        if slot.length:
            found.append(Span(start, slot.length, group, slot.position))
        start += slot.length
    return found


def compose(parts: Sequence[Span], bits: int) -> Message:
    """One message of some spans."""
    steps = sum(-(-span.length // span.group) for span in parts if span.group)
    floats = sum(span.length for span in parts if not span.group)
    next_step, next_float, next_code = 0, FLOAT * steps, FLOAT * (steps + floats)
    runs = []
    for start, length, group, position in parts:
        if group:
            runs.append(Run(start, length, group, next_step, next_code, position))
            next_step += FLOAT * runs[-1].groups
            next_code += -(-length * bits // 8)
        else:
            runs.append(Run(start, length, 0, next_float, next_code, position))
            next_float += FLOAT * length
    return Message(tuple(runs), steps, floats, next_code - FLOAT * (steps + floats))


def share_out(whole: Sequence[Span], quantizer: Quantizer, workers: int) -> list[Message]:
    """M messages of nearly the same size, each of a stretch of the gradient.

    Buckets stay whole; a larger group is cut, and each of its pieces is then a group.
    """
    bits = quantizer.bits
    share = max(sum(span.length * _price(span, bits) for span in whole), 1) / workers
    shares: list[list[Span]] = [[] for _ in range(workers)]
    spent = 0.0
    for span in whole:
        price, start, end = _price(span, bits), span.start, span.start + span.length
        grain = quantizer.grain if span.group else 1
        while start < end:
            owner = min(int((spent + grain * price / 2) / share), workers - 1)
            room = (share * (owner + 1) - spent) / price
            length = min(max(round(room / grain), 1) * grain, end - start)
            if owner + 1 == workers:
                length = end - start
            group = quantizer.group(length) if span.group else 0
            position = span.position + start - span.start
            shares[owner].append(Span(start, length, group, position))
            start, spent = start + length, spent + length * price
    return [compose(parts, bits) for parts in shares]


def _price(span: Span, bits: int) -> float:
    """Bytes a value."""
    groups = -(-span.length // span.group) if span.group else span.length
    return bits / 8 * bool(span.group) + FLOAT * groups / span.length
