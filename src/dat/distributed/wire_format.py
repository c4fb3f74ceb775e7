"""The wire format: which bytes of a message encode which values; the same on every worker.

A message holds, in this order, the step sizes of its groups, the values that are sent as float32,
and the packed codes. To divide a gradient between M workers, it is cut into M messages of nearly
equal size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dat.distributed.quantizers import Quantizer
from dat.kernels.quantize.layout import FLOAT, MessageLayout, Run


class Slot(NamedTuple):
    """A tensor's place in the whole gradient, however DDP divides that into buckets."""

    shape: tuple[int, ...]
    position: int

    @property
    def length(self) -> int:
        return math.prod(self.shape)


class Span(NamedTuple):
    """Consecutive values of a bucket that are encoded in the same way."""

    start: int
    length: int
    group: int
    position: int


def spans(slots: Sequence[Slot], quantizer: Quantizer) -> list[Span]:
    """One span for each tensor of a bucket; a single one if a group spans all tensors."""
    if quantizer.whole and not quantizer.dense:
        length = sum(slot.length for slot in slots)
        return [Span(0, length, quantizer.group(length), slots[0].position)] if length else []
    tensors, start = [], 0
    for slot in slots:
        group = 0 if quantizer.keeps(slot.shape) else quantizer.group(slot.length)
        if slot.length:
            tensors.append(Span(start, slot.length, group, slot.position))
        start += slot.length
    return tensors


def message_layout(message_spans: Sequence[Span], bits: int) -> MessageLayout:
    """The layout of one message that encodes these spans."""
    steps = sum(-(-span.length // span.group) for span in message_spans if span.group)
    floats = sum(span.length for span in message_spans if not span.group)
    next_step, next_float, next_code = 0, FLOAT * steps, FLOAT * (steps + floats)
    runs = []
    for start, length, group, position in message_spans:
        if group:
            runs.append(Run(start, length, group, next_step, next_code, position))
            next_step += FLOAT * runs[-1].groups
            next_code += -(-length * bits // 8)
        else:
            runs.append(Run(start, length, 0, next_float, next_code, position))
            next_float += FLOAT * length
    return MessageLayout(tuple(runs), steps, floats, next_code - FLOAT * (steps + floats))


def chunk_layouts(
    bucket_spans: Sequence[Span], quantizer: Quantizer, workers: int
) -> list[MessageLayout]:
    """The layouts of M messages of nearly equal size, each of a contiguous part of the gradient.

    Buckets are never divided; a larger group is, and each of its pieces becomes a group.
    """
    bits = quantizer.bits
    total = sum(span.length * _bytes_per_value(span, bits) for span in bucket_spans)
    budget = max(total, 1) / workers
    chunks: list[list[Span]] = [[] for _ in range(workers)]
    used = 0.0
    for span in bucket_spans:
        cost, start, end = _bytes_per_value(span, bits), span.start, span.start + span.length
        grain = quantizer.grain if span.group else 1
        while start < end:
            middle = used + min(grain, end - start) * cost / 2
            owner = min(int(middle / budget), workers - 1)
            room = (budget * (owner + 1) - used) / cost
            length = min(max(round(room / grain), 1) * grain, end - start)
            if owner + 1 == workers:
                length = end - start
            group = quantizer.group(length) if span.group else 0
            position = span.position + start - span.start
            chunks[owner].append(Span(start, length, group, position))
            start, used = start + length, used + length * cost
    return [message_layout(chunk, bits) for chunk in chunks]


def _bytes_per_value(span: Span, bits: int) -> float:
    groups = -(-span.length // span.group) if span.group else span.length
    return bits / 8 * bool(span.group) + FLOAT * groups / span.length
